"""The YAML files against published schemas, which tests/data/schemas has with their sources; JobSet's own fields by a schema written here.

JobSet's schema is in no Python package. What its jobs are is Kubernetes' own `JobTemplateSpec`.
"""

import copy
import json

import jsonschema
import pytest
import yaml
from test_scripts import POD, ROOT, SCRIPTS, TRAIN, call, fake

SCHEMAS = ROOT / "tests" / "data" / "schemas"
JOB = json.loads((SCHEMAS / "kubernetes_job.json").read_text())
SKY = json.loads((SCHEMAS / "skypilot.json").read_text())
REASONS = ["BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy"]
ACTIONS = ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]


def fields(required=(), **properties):
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


WHY = {"type": "array", "items": {"enum": REASONS}, "minItems": 1}
RULE = fields(["action"], name={"type": "string"}, action={"enum": ACTIONS}, onJobFailureReasons=WHY)
REPLICATED = fields(
    ["name", "template"], name={"type": "string"}, replicas={"type": "integer", "minimum": 0}, template={"$ref": JOB["$ref"]}
)
JOBSET = fields(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=fields(["name"], name={"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"}),
    spec=fields(
        ["replicatedJobs"],
        failurePolicy=fields(maxRestarts={"type": "integer", "minimum": 0}, rules={"type": "array", "items": RULE}),
        replicatedJobs={"type": "array", "items": REPLICATED, "minItems": 1},
    ),
) | {"$defs": JOB["$defs"]}


def jobset(path, *flags):
    fake(path, "kubectl", f"cat > {path}/applied")
    assert call("gke.sh", "submit", *POD, *flags, *TRAIN, path=path).returncode == 0
    return yaml.safe_load((path / "applied").read_text())


@pytest.mark.parametrize("flags", [(), ("--topology=4x4", "--chips=4", "--hosts=4")])
def test_the_jobset_is_one_of_kubernetes(tmp_path, flags):
    jsonschema.validate(jobset(tmp_path, *flags), JOBSET, cls=jsonschema.Draft202012Validator)


def test_a_field_that_kubernetes_does_not_know_is_noticed(tmp_path):
    good = jobset(tmp_path)

    def job(one):
        return one["spec"]["replicatedJobs"][0]["template"]["spec"]

    def pod(one):
        return job(one)["template"]["spec"]

    for spoil in (
        lambda one: job(one).update(parallelsim=1),
        lambda one: job(one).update(completions="four"),
        lambda one: pod(one)["containers"][0].update(arg=["--x"]),
        lambda one: pod(one).pop("containers"),
        lambda one: one["spec"]["failurePolicy"]["rules"][0].update(action="Fail"),
        lambda one: one["spec"].update(maxRestarts=3),
    ):
        wrong = copy.deepcopy(good)
        spoil(wrong)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, JOBSET, cls=jsonschema.Draft202012Validator)


def test_the_skypilot_file_is_a_task_of_skypilot():
    task = yaml.safe_load((SCRIPTS / "skypilot.yaml").read_text())
    jsonschema.validate(task, SKY["task"])
    jsonschema.validate(task["resources"], SKY["resources"])
    for part, schema, wrong in ((task, "task", "num_node"), (task["resources"], "resources", "spot")):
        with pytest.raises(jsonschema.ValidationError, match=wrong):
            jsonschema.validate(part | {wrong: 1}, SKY[schema])


def test_the_schemas_name_their_sources():
    assert all("PyPI" in schema["source"] and "Apache-2.0" in schema["source"] for schema in (JOB, SKY))
