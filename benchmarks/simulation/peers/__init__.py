"""The setting in other libraries. Each module runs in that library's virtual environment, without our packages."""
