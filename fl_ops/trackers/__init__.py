"""A run's rounds for TensorBoard and MLflow: from a coordinator's ledger, from a simulation and from a comparison.

`facts` names a round's values, in one way for all three sources. `tensorboard_files` and `mlflow_runs` write what is
not there yet, so a repeated call adds nothing twice. The other modules connect a source with them.
"""
