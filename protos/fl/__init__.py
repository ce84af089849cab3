"""Wire packages of the federated-learning contract."""
