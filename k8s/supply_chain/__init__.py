"""What the images consist of: the hashes of all packages, their bill of materials, and their licences.

`python -m k8s.supply_chain.hashes` writes k8s/images/requirements, `python -m k8s.supply_chain.sbom` a bill of
materials, and `python -m k8s.supply_chain.licences` the page docs/development/licences.md.
"""
