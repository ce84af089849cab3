"""The plugin with the laws of methods and reducers."""

pytest_plugins = ["algorithms.conformance.plugin"]
