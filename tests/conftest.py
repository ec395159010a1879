"""Hypothesis profiles: the default is quick enough for every run, `--hypothesis-profile=long` looks further."""

from hypothesis import HealthCheck, Phase, settings

_COMMON = {
    "deadline": None,
    "phases": [Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}

settings.register_profile("default", max_examples=40, derandomize=True, **_COMMON)
settings.register_profile("long", max_examples=2000, derandomize=False, **_COMMON)
settings.load_profile("default")
