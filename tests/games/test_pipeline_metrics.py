"""Raw and fair metrics of a pipeline, and submissions from programs that nobody trusts."""

import csv
import io

import numpy as np
import pytest

from marl_llm.games.pipeline.metrics import METRICS, fair, macro_f1, roc_auc, root_mean_square_error, score_cap
from marl_llm.games.pipeline.submissions import PROBLEMS, join

IDS = [str(i) for i in range(100, 110)]
TRUTH = np.arange(10.0)
GOOD = "id,y\n" + "".join(f"{i},{v:g}\n" for i, v in zip(IDS, TRUTH))

# Table 2 of the paper: metric -> (success of its kind, raw, fair) at epochs 0, 11 and 21; errors in % of the target's range.
TABLE_2 = {
    "accuracy": ((0.438, 0.690, 0.583), (0.562, 0.889, 0.719), (0.438, 0.889, 0.670)),
    "f1": ((0.438, 0.288, 0.126), (0.562, 0.309, 0.174), (0.438, 0.263, 0.115)),
    "mae": ((0.625, 0.071, 0.232), (0.875, 0.069, 0.123), (0.875, 0.057, 0.112)),
    "rmse": ((0.625, 0.098, 0.249), (0.875, 0.095, 0.146), (0.875, 0.080, 0.132)),
}


@pytest.mark.parametrize("metric", TABLE_2)
def test_every_fair_figure_of_the_papers_table_follows_from_its_raw_figure_and_success(metric):
    for success, raw, printed in TABLE_2[metric]:
        assert fair(success, raw, METRICS[metric].penalty) == pytest.approx(printed, abs=5.1e-4)


def test_without_a_success_there_is_no_raw_figure_and_the_fair_one_is_the_penalty():
    assert fair(0.0, None, METRICS["accuracy"].penalty) == 0.5
    assert fair(0.5, 0.8, METRICS["f1"].penalty) == 0.4
    with pytest.raises(ValueError, match="None without any"):
        fair(0.0, 0.3, 0.5)


def test_metrics_by_hand():
    truth, said = np.array([0, 0, 1, 1]), np.array([0, 1, 1, 2])
    assert macro_f1(truth, said) == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert roc_auc(truth, np.array([0.1, 0.4, 0.4, 0.9])) == 0.875
    assert root_mean_square_error(np.array([0.0, 4.0]), np.array([1.0, 3.0])) == pytest.approx(0.25)
    assert root_mean_square_error(TRUTH, np.full(10, 1e308)) == 1e6
    assert [score_cap(auc=x) for x in (0.9, 0.85, 0.8, 0.7, 0.6, 0.5)] == [9, 9, 8, 6, 4, 3]
    assert [score_cap(rmse=x) for x in (0.05, 0.1, 0.3, 0.6)] == [9, 8, 6, 4]
    assert score_cap() is None


def joined(text, numbers=True, low_high=None):
    return join(None if text is None else text.encode(), IDS, "id", ("y",), numbers, low_high)


def rows(change):
    table = [line.split(",") for line in GOOD.split()]
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(change(table))
    return out.getvalue()


def test_order_of_rows_and_columns_and_other_columns_change_nothing():
    shuffled = rows(lambda t: [["z", "y", "id"], *([f"x{i}", y, i] for i, y in reversed(t[1:]))])
    for text in (GOOD, shuffled, GOOD.replace("\n", "\r\n"), "\ufeff" + GOOD, rows(lambda t: [t[0], *([f"{i}.0", y] for i, y in t[1:])])):
        assert joined(text).columns["y"].tolist() == TRUTH.tolist()


ATTACKS = {
    "nothing": (None, "missing"),
    "an empty file": ("", "empty"),
    "a header alone": ("id,y\n", "id_missing"),
    "one row": ("id,y\n100,0\n", "id_missing"),
    "a row too many": (GOOD + "999,1\n", "id_unknown"),
    "doubled ids": (rows(lambda t: [*t, t[1]]), "id_doubled"),
    "an id in place of another": (GOOD.replace("101,", "100,"), "id_doubled"),
    "the same id in two spellings": (GOOD.replace("101,", "100.0,"), "id_doubled"),
    "no id column": (GOOD.replace("id,", "key,"), "column_missing"),
    "no target": (GOOD.replace(",y", ",x"), "column_missing"),
    "two columns of the target": (rows(lambda t: [[*row, row[1]] for row in t]), "column_doubled"),
    "text for numbers": (GOOD.replace(",3\n", ",three\n"), "not_a_number"),
    "digits of another script": (GOOD.replace(",3\n", ",٣\n"), "not_a_number"),
    "an underscore": (GOOD.replace(",3\n", ",1_0\n"), "not_a_number"),
    "NaN": (GOOD.replace(",3\n", ",nan\n"), "not_finite"),
    "infinity": (GOOD.replace(",3\n", ",-Infinity\n"), "not_finite"),
    "too large for a float": (GOOD.replace(",3\n", ",1e999\n"), "not_finite"),
    "a gap": (GOOD.replace(",3\n", ",\n"), "value_missing"),
    "a row cut off": (GOOD.replace(",3\n", "\n"), "row_length"),
    "an open quotation": (GOOD + '"110', "unreadable"),
    "a zero byte": (GOOD.replace(",3\n", ",\0\n"), "not_a_number"),
    "bytes that are no text": ("id,y\n\udcff", "row_length"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_is_missing_doubled_or_no_finite_number_is_invalid(attack):
    text, problem = ATTACKS[attack]
    data = None if text is None else text.encode("utf-8", "surrogateescape")
    found = join(data, IDS, "id", ("y",), True)
    assert (found.problem, dict(found.columns)) == (problem, {})
    assert problem in PROBLEMS


def test_constants_are_valid_and_worth_what_they_are_worth():
    constant = joined(rows(lambda t: [t[0], *([i, "4.5"] for i, _ in t[1:])])).columns["y"]
    assert root_mean_square_error(TRUTH, constant) == pytest.approx(np.sqrt(8.25) / 9)
    assert roc_auc(TRUTH > 4, constant) == 0.5


def test_probabilities_have_bounds_and_labels_are_texts():
    assert joined(GOOD, low_high=(0.0, 1.0)).problem == "out_of_range"
    assert joined(GOOD.replace(",3\n", ",3.0\n"), numbers=False).columns["y"].tolist() == [str(i) for i in range(10)]
    assert joined(GOOD.replace(",3\n", ",three\n"), numbers=False).columns["y"][3] == "three"
