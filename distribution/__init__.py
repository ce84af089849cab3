"""How this software gets to machines: the environment of a clone, and the files of a release. In no package itself."""
