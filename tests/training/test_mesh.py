"""Devices: how many there are, and what is said where there are too few."""

import jax
import pytest

from marl_llm.training import use_cpu_devices


def test_jax_that_has_started_keeps_its_devices_and_too_few_of_them_are_one_plain_line():
    there = jax.device_count()
    use_cpu_devices()
    use_cpu_devices(there)
    assert jax.device_count() == there
    with pytest.raises(ValueError, match=rf"^{there + 1} devices are asked for, and JAX has started with {there} in this process"):
        use_cpu_devices(there + 1)
