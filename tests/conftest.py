"""What is set for all tests."""

import os

import pytest

# A conftest of a folder may import it before it becomes a plugin.
pytest.register_assert_rewrite("tests.fixtures")

# No test's run may appear on a dashboard of the user's.
os.environ["MEMFORMERS_DASHBOARD"] = "off"
os.environ.pop("labml_app_url", None)


def pytest_configure(config):
    # With pytest-xdist, the first process only hands out tests, and need not import PyTorch.
    hands_out_tests = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if not hands_out_tests:
        config.pluginmanager.import_plugin("tests.fixtures")
