"""Federation overview: the runs, their health, and their use of time and bytes."""

from __future__ import annotations

from grafana_foundation_sdk.builders import stat, timeseries
from grafana_foundation_sdk.models import dashboard as models

from k8s.dashboards.expressions import (
    ENDS,
    OUTCOMES,
    PHASES,
    PROCESS,
    WORKERS,
    evaluation,
    increase,
    loop_lag,
    phase_seconds,
    quantile,
    share,
    since_commit,
)
from k8s.dashboards.frame import OVERVIEW, Frame, to_the_run
from k8s.dashboards.layout import Row, Section, place
from k8s.dashboards.panels import LOWEST, Query, Steps, What, coloured, limit, lines, number, stacked, word
from k8s.dashboards.run_table import run_table

FRAME = Frame(
    OVERVIEW,
    "Impetus / Federation overview",
    "The runs, their health, and their use of time and bytes. A run's name links to Run detail.",
    all_runs=True,
)
R = FRAME.runs
ADMITTED = 'state="admitted"'
SHARES: Steps = {LOWEST: "green", 0.1: "orange", 0.3: "red"}


def dashboard() -> models.Dashboard:
    """Return the complete dashboard."""
    sections = [
        Section("Is it healthy?", [Row(4, [*_alive(), *_shares(), *_reserves()])]),
        Section("What is running?", [Row(5, [run_table(R)])]),
        Section("Does it learn?", [Row(7, _learning())]),
        Section("Rounds", [Row(7, _rounds())]),
        Section("Clients", [Row(7, _clients()), Row(7, _trouble())]),
        Section("Devices", [Row(7, _devices())]),
        Section("Traffic", [Row(7, _traffic())]),
        Section("Coordinator", [Row(7, _coordinator()), Row(7, _leadership())]),
        Section("Workers", [Row(7, _workers())]),
    ]
    return place(FRAME.built(), sections)


def _alive() -> list[stat.Panel]:
    states = {"0": ("Serving", "green"), "1": ("Draining", "orange"), "2": ("Down", "red")}
    deadline = f"max by (run) (fl_round_deadline_seconds{{{R}}})"
    return [
        word(
            What("Coordinator", "none", "Down: no coordinator answers its scraper. Draining: it is shutting down."),
            "max(fl_draining) or vector(2)",
            states,
        ),
        number(
            What(
                "Alerts firing",
                "none",
                "Alerts of the rules for this dashboard; docs/operation/runbook.md has the actions.",
            ),
            'count(ALERTS{alertname=~"Fl.+",alertstate="firing"}) or vector(0)',
            {LOWEST: "green", 1: "red"},
        ),
        number(
            What("Clients present", "none", "Daemons with an open session."),
            'sum(fl_clients{state="present"})',
            {LOWEST: "red", 1: "green"},
        ),
        number(
            What(
                "Overdue commit",
                "percentunit",
                "The longest time since the last commit of a running run, in deadlines of an attempt. Over 100%: one "
                "attempt was not enough.",
            ),
            f"max (({since_commit(R)}) / on (run) {deadline})",
            {LOWEST: "green", 1: "orange", 3: "red"},
        ),
    ]


def _shares() -> list[stat.Panel]:
    refused = f"sum ({increase('fl_updates_refused_total', R)})"
    admitted = f"sum ({increase('fl_assignments_total', f'{R},{ADMITTED}')})"
    return [
        number(
            What(
                "Drop-outs", "percentunit", "Share of lost or failed assignments among those that were not cancelled."
            ),
            share(R, "lost|failed"),
            SHARES,
        ),
        number(
            What(
                "Updates refused",
                "percentunit",
                "Share of updates that were refused at the gate among the complete ones.",
            ),
            f"{refused} / (({refused} + {admitted}) > 0)",
            {LOWEST: "green", 0.02: "orange", 0.1: "red"},
        ),
    ]


def _reserves() -> list[stat.Panel]:
    return [
        number(
            What("State directory", "percentunit", "Used share of the volume with ledger, spool and checkpoints."),
            "max(1 - fl_state_dir_available_bytes / fl_state_dir_size_bytes)",
            {LOWEST: "green", 0.8: "orange", 0.9: "red"},
        ),
        number(
            What(
                "Certificate life left",
                "percentunit",
                "The smallest share of its life that a certificate of the coordinator has left; empty with plain text. "
                "Renewals are due at a third.",
            ),
            "min((fl_certificate_expiry_timestamp_seconds - time()) / fl_certificate_lifetime_seconds)",
            {LOWEST: "red", 0.1: "orange", 0.25: "green"},
        ),
    ]


def _learning() -> list[timeseries.Panel]:
    accuracy = lines(
        What("Accuracy", "percentunit", "On held-out data, after each evaluated round. Click a line for its run."),
        Query(evaluation(R, "accuracy"), "{{run}}"),
    )
    loss = lines(
        What("Loss", "none", "On held-out data. It rises while accuracy is constant: the model is overconfident."),
        Query(evaluation(R, "loss"), "{{run}}"),
    )
    return [to_the_run(accuracy.max(1)), to_the_run(loss)]


def _rounds() -> list[timeseries.Panel]:
    outcomes = stacked(
        What(
            "Rounds by outcome", "none", "Within the window. Below quorum: attempts, after which the round continues."
        ),
        Query(f"sum by (outcome) ({increase('fl_rounds_total', R)})", "{{outcome}}"),
        Query(f"sum ({increase('fl_quorum_missed_total', R)})", "below quorum"),
    )
    seconds = lines(
        What(
            "Round duration", "s", "From the first draw to the commit, over all runs; coarse, because it is in buckets."
        ),
        Query(quantile(0.5, "fl_round_seconds", R), "half are faster"),
        Query(quantile(0.95, "fl_round_seconds", R), "95% are faster"),
    )
    phases = stacked(
        What(
            "Where a round's time goes",
            "s",
            "Mean seconds of each phase in a round. Collecting is the time of the clients.",
        ),
        Query(phase_seconds(R), "{{phase}}"),
    )
    return [coloured(outcomes.decimals(0), OUTCOMES), seconds, coloured(phases, PHASES)]


def _clients() -> list[timeseries.Panel]:
    who = lines(
        What(
            "Clients",
            "none",
            "Suspect: the stream is lost, within the grace period. Quarantined: not drawn for a time.",
        ),
        Query("sum by (state) (fl_clients)", "{{state}}"),
        Query("sum(fl_clients_quarantined)", "quarantined"),
    )
    ends = stacked(
        What("Assignments by end", "none", "Within the window. Cancelled: the round had enough updates without it."),
        Query(f"sum by (state) ({increase('fl_assignments_total', R)})", "{{state}}"),
    )
    drops = lines(
        What(
            "Drop-outs by run",
            "percentunit",
            "Share of lost or failed assignments among those that were not cancelled.",
        ),
        Query(share(R, "lost|failed", " by (run)"), "{{run}}"),
    )
    return [
        coloured(who.decimals(0), {"present": "green", "suspect": "orange", "quarantined": "red"}),
        coloured(ends.decimals(0), ENDS),
        to_the_run(limit(drops, {0.3: "red"})),
    ]


def _trouble() -> list[timeseries.Panel]:
    attention = lines(
        What(
            "Clients that need attention",
            "none",
            "They fail, are refused, are slow or are in quarantine. `fl clients list --attention` has the reasons.",
        ),
        Query("max(fl_clients_need_attention)", "need attention"),
    )
    waits = stacked(
        What(
            "Why runs wait",
            "none",
            "Registered clients that a run cannot draw, while too few can be drawn. Lost: away. Task: they lack it.",
        ),
        Query(f"sum by (run, reason) (fl_clients_not_drawn{{{R}}})", "{{run}}: {{reason}}"),
    )
    attention = coloured(attention.decimals(0), {"need attention": "orange"})
    return [limit(attention, {1: "red"}), to_the_run(waits.decimals(0))]


def _devices() -> list[timeseries.Panel]:
    attached = lines(
        What("Daemons", "none", "The scraped daemons. May not train: a gate of the device's owner is closed."),
        Query("count(fl_client_attached)", "scraped"),
        Query("sum(fl_client_attached)", "attached"),
        Query("count(fl_client_may_train == 0)", "may not train"),
    )
    training = lines(
        What("Local training", "s", "One update on one device. Wide spread: some devices are much slower."),
        Query(quantile(0.5, "fl_client_training_seconds"), "half are faster"),
        Query(quantile(0.95, "fl_client_training_seconds"), "95% are faster"),
    )
    failures = stacked(
        What("Work that failed on devices", "none", "Within the window, by reason, as the daemons report it."),
        Query("sum by (reason) (increase(fl_client_work_failures_total[$window])) > 0", "{{reason}}"),
    )
    attached = coloured(attached.decimals(0), {"scraped": "text", "attached": "green", "may not train": "orange"})
    return [attached, training, failures.decimals(0)]


def _traffic() -> list[timeseries.Panel]:
    tensors = stacked(
        What("Tensor bytes", "Bps", "Over all runs. Down: what clients fetch. Up: their updates."),
        Query("sum by (direction, kind) (rate(fl_transfer_bytes_total[$window])) > 0", "{{direction}}: {{kind}}"),
    )
    uploads = lines(
        What("Uploads under way", "bytes", "Announced and not complete. It does not fall: uploads are stuck."),
        Query("sum(fl_uploads_in_flight_bytes)", "under way"),
    )
    calls = lines(
        What("Slow calls", "s", "99% of a daemon's calls are faster; a transfer takes as long as its link is slow."),
        Query(quantile(0.99, "fl_rpc_seconds", 'rpc=~"Register|FetchModel|SubmitUpdate"', "le, rpc"), "{{rpc}}"),
    )
    return [tensors, uploads, calls]


def _coordinator() -> list[timeseries.Panel]:
    lag = lines(
        What("Delays", "s", "99% are shorter. A late event loop answers everybody late; a slow commit is a slow disk."),
        Query(loop_lag(PROCESS), "event loop"),
        Query(quantile(0.99, "fl_commit_write_seconds"), "writing a commit"),
    )
    memory = lines(
        What("Memory", "bytes", "Resident. It grows with the model and open transfers, not with the clients."),
        Query(f"max(process_resident_memory_bytes {PROCESS})", "resident"),
    )
    processor = lines(
        What("Processor", "none", "Cores in use. Reducing, stepping and evaluating use most."),
        Query(f"max(rate(process_cpu_seconds_total[$window]) {PROCESS})", "cores"),
    )
    return [limit(lag, {0.5: "red"}), memory, processor]


def _leadership() -> list[timeseries.Panel]:
    leaders = lines(
        What("Leader and standbys", "none", "One leads. With a standby the end of the leader costs seconds."),
        Query("sum(fl_leading)", "lead"),
        Query("max(fl_standbys)", "wait"),
    )
    lease = lines(
        What("Lease", "s", "Since the leader renewed it and the standby read it. It ends after lease_s (10 s)."),
        Query("fl_lease_age_seconds", "{{instance}}"),
    )
    store = lines(
        What("Object store", "s", "95% of the requests are faster, with their repetitions."),
        Query(quantile(0.95, "fl_object_request_seconds", by="le, request"), "{{request}}"),
    )
    return [coloured(leaders.decimals(0), {"lead": "green", "wait": "blue"}), limit(lease, {10: "red"}), store]


def _workers() -> list[timeseries.Panel]:
    count = lines(
        What("Workers", "none", "Scraped, and attached to the leader. Empty without workers."),
        Query("count(fl_worker_build_info)", "scraped"),
        Query("max(fl_workers)", "attached"),
    )
    transfers = lines(
        What("Transfers by worker", "none", "Uploads and downloads under way. Very different: FlWorkerImbalance."),
        Query(f'sum by (instance) (fl_transfer_calls{{kind=~"uploads|downloads"}} {WORKERS})', "{{instance}}"),
    )
    processor = lines(
        What("Processor by worker", "none", "Cores in use. A worker that is at one moves no more bytes."),
        Query(f"rate(process_cpu_seconds_total[$window]) {WORKERS}", "{{instance}}"),
    )
    lag = lines(
        What("Delays by worker", "s", "99% of the event loop's wake-ups are less late."),
        Query(loop_lag(WORKERS, "le, instance"), "{{instance}}"),
    )
    count = coloured(count.decimals(0), {"scraped": "text", "attached": "green"})
    return [count, transfers.decimals(0), limit(processor, {1: "orange"}), limit(lag, {0.5: "red"})]
