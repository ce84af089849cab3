"""Checks beyond schemas: whether objects fit each other and their programs.

Each check is a function of all objects and yields a message for each problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tests.k8s import network_checks, pod_checks, reference_checks
from tests.k8s.objects import Object

CHECKS: tuple[Callable[[Sequence[Object]], Iterator[str]], ...] = (
    reference_checks.namespaces_are_guarded,
    reference_checks.volumes_are_there,
    reference_checks.references_are_there,
    reference_checks.files_are_there,
    reference_checks.keys_are_not_shared,
    reference_checks.certificates_name_roles,
    network_checks.selectors_match,
    network_checks.services_lead_to_ports,
    network_checks.monitors_find_ports,
    network_checks.routes_lead_to_services,
    network_checks.autoscalers_have_a_target,
    network_checks.budgets_have_an_effect,
    network_checks.policies_close_everything,
    network_checks.policies_open_what_is_needed,
    pod_checks.ports_are_the_settings,
    pod_checks.probes_ask_what_is_answered,
    pod_checks.stopping_takes_its_time,
    pod_checks.a_hung_coordinator_is_killed_soon,
    pod_checks.probes_leave_time_to_start,
    pod_checks.the_reason_of_an_exit_is_shown,
    pod_checks.one_coordinator,
    pod_checks.workers_are_scaled,
    pod_checks.images_are_pinned,
    pod_checks.pods_are_restricted,
    pod_checks.gpus_come_with_all_they_need,
    pod_checks.shards_are_distinct,
)


def problems(objects: Sequence[Object]) -> list[str]:
    """The problems of all checks."""
    return [problem for check in CHECKS for problem in check(objects)]
