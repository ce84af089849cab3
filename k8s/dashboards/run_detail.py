"""Run detail: one run's model, updates, clients and rounds."""

from __future__ import annotations

from grafana_foundation_sdk.builders import common, heatmap, stat, timeseries
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.common import ScaleDistribution
from grafana_foundation_sdk.models.dashboard import DynamicConfigValue

from k8s.dashboards.expressions import ENDS, PHASES, RUN_STATES, evaluation, increase, phase_seconds, since_commit
from k8s.dashboards.frame import RUN_DETAIL, Frame
from k8s.dashboards.layout import Row, Section, place
from k8s.dashboards.panels import (
    LOWEST,
    Query,
    What,
    buckets,
    coloured,
    dashed,
    limit,
    lines,
    number,
    stacked,
    word,
)

FRAME = Frame(
    RUN_DETAIL,
    "Impetus / Run detail",
    "One run: the quality of its model, its updates, its clients, and its rounds' use of time.",
    all_runs=False,
)
R = FRAME.runs
LEFT = f"(max(fl_rounds_planned{{{R}}}) - max(fl_round{{{R}}}))"
COMMITTED = f'{R},outcome="committed"'
MEAN_ROUND = (
    f"sum(rate(fl_round_seconds_sum{{{R}}}[$window])) / (sum(rate(fl_round_seconds_count{{{R}}}[$window])) > 0)"
)


def dashboard() -> models.Dashboard:
    """Return the complete dashboard."""
    sections = [
        Section("$run", [Row(4, [*_progress(), *_values()])]),
        Section("What is the model worth?", [Row(8, [*_worth(), _spread()])]),
        Section("Updates and momentum", [Row(8, [_norms(), _cosine(), _staleness()])]),
        Section("Clients", [Row(8, _clients())]),
        Section("Privacy", [Row(8, [_privacy()])]),
        Section("Rounds", [Row(8, _rounds())]),
    ]
    return place(FRAME.built(), sections)


def _progress() -> list[stat.Panel]:
    state = " + ".join(
        f'{number} * max(fl_run_state{{{R},state="{name}"}})' for number, name in enumerate(RUN_STATES, start=1)
    )
    words = {
        str(number): (name.capitalize(), colour) for number, (name, colour) in enumerate(RUN_STATES.items(), start=1)
    }
    return [
        word(What("State", "none", "Waiting: too few clients to draw a cohort. Failed: see the log."), state, words),
        number(What("Rounds committed", "none", "Rounds that the model contains."), f"max(fl_round{{{R}}})"),
        number(
            What("Done", "percentunit", "Share of the rounds after which the run ends."),
            f"max(fl_round{{{R}}}) / max(fl_rounds_planned{{{R}}})",
        ).decimals(0),
        number(
            What("Time left", "s", "Remaining rounds, at the mean duration of those within the window."),
            f"{LEFT} * {MEAN_ROUND}",
        ),
    ]


def _values() -> list[stat.Panel]:
    return [
        number(
            What("Accuracy", "percentunit", "On held-out data, of the newest model that was evaluated."),
            evaluation(R, "accuracy"),
        ).decimals(1),
        number(
            What(
                "Best accuracy",
                "percentunit",
                "The highest so far. The kept round is the best by the run's metric.",
            ),
            f'max(fl_evaluation_best{{{R},metric="accuracy"}})',
        ).decimals(1),
        number(
            What("Since the last commit", "s", "While the run is running."),
            since_commit(R),
        ),
        number(
            What("Not finite", "none", "Evaluations with NaN or infinity. Over 0: the model has diverged."),
            f"sum(fl_evaluations_not_finite_total{{{R}}})",
            {LOWEST: "green", 1: "red"},
        ),
    ]


def _worth() -> list[timeseries.Panel]:
    accuracy = lines(
        What("Accuracy", "percentunit", "On held-out data, and the best so far."),
        Query(f'max(fl_evaluation_best{{{R},metric="accuracy"}})', "best"),
        Query(evaluation(R, "accuracy"), "held out"),
    )
    loss = lines(
        What("Loss", "none", "Training: loss of the accepted clients on their own data. Far below: they overfit."),
        Query(evaluation(R, "loss"), "held out"),
        Query(f"max(fl_training_loss{{{R}}})", "training"),
    )
    return [
        dashed(coloured(accuracy.max(1), {"held out": "green", "best": "text"}), "best"),
        coloured(loss, {"held out": "green", "training": "orange"}),
    ]


def _spread() -> timeseries.Panel:
    spread = f'fl_client_evaluation{{{R},metric="accuracy",statistic='
    mean, deviation, worst = (f'max({spread}"{name}"}})' for name in ("mean", "deviation", "worst_decile"))
    clients = lines(
        What(
            "Accuracy on the clients' own data",
            "percentunit",
            "Mean, one standard deviation around it, and the worst tenth. Wide: the model is worse for some clients. "
            "Empty without evaluation.clients_every.",
        ),
        Query(mean, "mean"),
        Query(f"clamp_max({mean} + {deviation}, 1)", "one deviation above"),
        Query(f"clamp_min({mean} - {deviation}, 0)", "one deviation below"),
        Query(worst, "worst tenth"),
    )
    clients = _band(clients.fill_opacity(0).max(1), "one deviation below", "one deviation above")
    return coloured(clients, {"mean": "blue", "worst tenth": "red"})


def _norms() -> timeseries.Panel:
    norms = lines(
        What(
            "Norms",
            "none",
            "L2 norms of the last round. The step is shorter than the updates if they disagree; a largest update far "
            "from the mean is an outlier. The direction is the sent momentum.",
        ),
        Query(f'max(fl_norm{{{R},of="update"}})', "update: mean"),
        Query(f'max(fl_norm{{{R},of="update_largest"}})', "update: largest"),
        Query(f'max(fl_norm{{{R},of="update_smallest"}})', "update: smallest"),
        Query(f'max(fl_norm{{{R},of="aggregate"}})', "step"),
        Query(f'max(fl_norm{{{R},of="direction"}})', "direction"),
    )
    norms = norms.fill_opacity(0).scale_distribution(
        common.ScaleDistributionConfig().type(ScaleDistribution.LOG).log(10)
    )
    norms = _band(norms, "update: smallest", "update: largest")
    return coloured(norms, {"update: mean": "blue", "step": "orange", "direction": "purple"})


def _cosine() -> timeseries.Panel:
    cosine = lines(
        What(
            "Cosine of update and momentum",
            "none",
            "Between the round's mean update and the direction that the clients used. Near 1: momentum and updates "
            "agree; below 0: they are opposed. Empty for methods without a direction.",
        ),
        Query(f"max(fl_update_direction_cosine{{{R}}})", "cosine"),
    )
    return limit(coloured(cosine.fill_opacity(0).min(-1).max(1), {"cosine": "purple"}), {0: "text"})


def _staleness() -> heatmap.Panel:
    return buckets(
        What(
            "Staleness",
            "none",
            "Updates within the window, by the rounds from the model that they were made from to the one they came in.",
        ),
        f"sum by (le) ({increase('fl_update_staleness_rounds_bucket', R)})",
    )


def _clients() -> list[timeseries.Panel]:
    ends = stacked(
        What("Assignments by end", "none", "Within the window. Cancelled: the round had enough updates without it."),
        Query(f"sum by (state) ({increase('fl_assignments_total', R)})", "{{state}}"),
    )
    refused = stacked(
        What(
            "Updates refused, by reason",
            "none",
            "Within the window. norm: far longer than usual; layout: another model.",
        ),
        Query(f"sum by (reason) ({increase('fl_updates_refused_total', R)}) > 0", "{{reason}}"),
    )
    drawn = lines(
        What(
            "Wanted and available",
            "none",
            "Over-selection draws more clients than needed; their number follows the drop-outs so far.",
        ),
        Query(f"max(fl_clients_per_round{{{R}}})", "wanted in a round"),
        Query(f"max(fl_clients_per_round{{{R}}}) * max(fl_over_selection{{{R}}})", "drawn, with over-selection"),
        Query(f"max(fl_clients_eligible{{{R}}})", "could be drawn"),
    )
    colours = {"wanted in a round": "text", "drawn, with over-selection": "orange", "could be drawn": "green"}
    counted = [coloured(ends.decimals(0), ENDS), refused.decimals(0), coloured(drawn.fill_opacity(0), colours)]
    return [*counted, _shares()]


def _privacy() -> timeseries.Panel:
    spent = lines(
        What(
            "Privacy spent",
            "none",
            "Epsilon of the run's account, by accountant: Renyi divergences hold the budget. With privacy of records "
            "what devices state. Empty without differential privacy.",
        ),
        Query(f'max(fl_privacy_epsilon{{{R},accountant="renyi"}})', "Renyi divergences"),
        Query(f'max(fl_privacy_epsilon{{{R},accountant="loss_distributions"}})', "privacy loss distributions"),
        Query(f'max(fl_privacy_stated_epsilon{{{R},statistic="median"}})', "stated: median"),
        Query(f'max(fl_privacy_stated_epsilon{{{R},statistic="largest"}})', "stated: largest"),
    )
    return spent.fill_opacity(0)


def _shares() -> timeseries.Panel:
    shares = lines(
        What(
            "Counted updates of a client, of its due",
            "percentunit",
            "Over all rounds, of clients that are due five or more. Far apart: rounds close before slow clients "
            "deliver, and the model learns little of their data.",
        ),
        *(
            Query(f'max(fl_client_share_of_due{{{R},statistic="{statistic}"}})', name)
            for statistic, name in (
                ("highest", "highest"), ("median", "median"), ("worst_decile", "worst tenth"), ("lowest", "lowest"),
            )
        ),
    )  # fmt: skip
    colours = {"highest": "green", "median": "blue", "worst tenth": "red", "lowest": "text"}
    return limit(coloured(shares.fill_opacity(0), colours), {0.5: "text"})


def _rounds() -> list[timeseries.Panel]:
    phases = stacked(
        What(
            "Where a round's time goes",
            "s",
            "Mean seconds of each phase in a round. Collecting is the time of the clients.",
        ),
        Query(phase_seconds(R), "{{phase}}"),
    )
    seconds = lines(
        What("Round duration", "s", "From the first draw to the commit, the mean within the window."),
        Query(MEAN_ROUND, "mean"),
    )
    attempts = lines(
        What(
            "Attempts and quorum",
            "none",
            "Within the window. More attempts than rounds: clients drop out, or are slow.",
        ),
        Query(f"sum({increase('fl_attempts_total', R)})", "attempts"),
        Query(f"sum({increase('fl_rounds_total', COMMITTED)})", "committed rounds"),
        Query(f"sum({increase('fl_quorum_missed_total', R)})", "below quorum"),
    )
    colours = {"attempts": "blue", "committed rounds": "green", "below quorum": "orange"}
    return [coloured(phases, PHASES), seconds, coloured(attempts.decimals(0), colours)]


def _band(panel: timeseries.Panel, low: str, high: str) -> timeseries.Panel:
    """Fill the area between two series in pale blue."""
    thin = [
        DynamicConfigValue("color", {"mode": "fixed", "fixedColor": "blue"}),
        DynamicConfigValue("custom.lineWidth", 0),
    ]
    panel = panel.override_by_name(low, [*thin, DynamicConfigValue("custom.fillOpacity", 0)])
    fill = [DynamicConfigValue("custom.fillBelowTo", low), DynamicConfigValue("custom.fillOpacity", 20)]
    return panel.override_by_name(high, [*thin, *fill])
