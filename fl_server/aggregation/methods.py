"""A run's method: built from its configuration, which is checked and completed; what it has in a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import algorithms as fl
from algorithms.optimizers.classes import check_optimizer
from algorithms.optimizers.federated import check_combination, with_optimizer
from algorithms.optimizers.spec import OptimizerSpec, RateSchedule
from algorithms.reference import KnownPart, Reference, has_reference, reference_of
from fl_server.aggregation.privacy import check_one_release, check_privacy, check_record_privacy
from fl_server.aggregation.reduction import check_reducer
from fl_server.aggregation.secure_aggregation import check_secure_aggregation, check_summed
from fl_server.aggregation.server_update import check_buffered
from fl_server.errors import InvalidInput
from fl_server.rounds.sampling import drawn_steps
from fl_server.run_settings.config import RunConfig, ScheduleSection
from fl_server.run_settings.sections import MAX_COUNT, LocalSection, RateSection
from protos.encodings import EncodingSpec


def build_algorithm(config: RunConfig) -> fl.Algorithm:
    """The run's method with its parameters of round 0, after a check that the configuration has everything it needs.

    Raises:
        AlgorithmError: the method or its parameters are unknown or invalid.
        InvalidInput: the run lacks a value that the method needs, or its reducer excludes the method.
    """
    plain = fl.build(config.algorithm.name, **config.algorithm.parameters)
    check_schedules(config.algorithm.schedules, plain, config.horizon)
    algorithm = _with_optimizer(config, plain)
    # A state that only its own device reads does not have to add up to one on the server.
    check_reducer(config.round, algorithm if algorithm.averaged else plain)
    if config.encodings.sparse and config.round.reducer != "mean":
        expected = f'"mean" with encodings.update = "{config.encodings.update}": most values of each update are 0'
        raise InvalidInput("round.reducer", expected, config.round.reducer)
    smallest = config.round.clients_per_round if config.round.sampling == "fixed" else 1
    if algorithm.needs_population and config.population < smallest:
        raise InvalidInput(
            "population",
            f"N, the clients that the run may ever draw from, {smallest} or more: {algorithm.name} needs it",
            config.population,
        )
    if algorithm.skipping:
        _check_skipping(config, algorithm.name)
    if config.client_privacy is not None:
        check_privacy(config)
        check_one_release(config, algorithm)
    if config.record_privacy is not None:
        check_record_privacy(config, algorithm)
    check_secure_aggregation(config)
    check_summed(config, algorithm, rate_schedule(config.local.schedule))
    check_buffered(config, algorithm)
    if algorithm.objective == "examples":
        _check_examples(config)
    return algorithm


def _check_examples(config: RunConfig) -> None:
    """Raises InvalidInput for what a run with the objective "examples" lacks or excludes."""
    if config.round.max_client_share:
        raise InvalidInput(
            "round.max_client_share",
            '0 with objective = "examples", for clients weigh their own steps by their examples',
            config.round.max_client_share,
        )
    if not config.population_examples:
        raise InvalidInput(
            "population_examples", 'the examples of all clients together, for objective = "examples"', "nothing"
        )


def _check_skipping(config: RunConfig, name: str) -> None:
    """Raises InvalidInput unless every round has all clients, and the run leaves the number of steps to the method."""
    everyone = {"sampling": "fixed", "clients_per_round": config.population, "close": "cohort"}
    for key, value in (everyone | {"quorum": config.population}).items():
        if (came := getattr(config.round, key)) != value:
            raise InvalidInput(f"round.{key}", f"{value!r}, for all clients take part in each round of {name}", came)
    for key, default in (("steps", None), ("epochs", 1)):
        if (came := getattr(config.local, key)) not in {None, default}:
            raise InvalidInput(f"local.{key}", f"none with {name}, which draws the steps of each round by its p", came)


def _with_optimizer(config: RunConfig, algorithm: fl.Algorithm) -> fl.Algorithm:
    """The method with the run's optimizer. Raises InvalidInput, with the reason, if they exclude each other."""
    spec = optimizer_spec(config.local)
    try:
        check_optimizer(spec)
    except fl.AlgorithmError as error:
        raise InvalidInput("local.optimizer", "an optimizer with values that it accepts", error) from error
    try:
        check_combination(algorithm, spec, rate_schedule(config.local.schedule), inexact=config.local.inexact)
    except fl.AlgorithmError as error:
        raise InvalidInput(f"local.{error.parameter}", "one that the method allows", error) from error
    return with_optimizer(algorithm, spec)


def optimizer_spec(local: LocalSection) -> OptimizerSpec:
    """The optimizer of the local steps; plain SGD if none is given."""
    given = local.optimizer
    return OptimizerSpec() if given is None else OptimizerSpec(given.name, given.parameters, given.state)


def rate_schedule(given: RateSection | None) -> RateSchedule:
    """A schedule of the learning rate; constant if none is given."""
    return RateSchedule() if given is None else RateSchedule(given.kind, given.warmup, given.end)


def step_schedule(config: RunConfig, round_: int) -> RateSchedule:
    """The schedule over a round's local steps, or its part of the one over all steps of the run."""
    given, steps = config.local.schedule, config.local.steps
    schedule = rate_schedule(given)
    if given is None or given.over == "round" or steps is None:
        return schedule
    return replace(schedule, first=round_ * steps, total=config.horizon * steps)


def learning_rate_in(config: RunConfig, round_: int) -> float:
    """eta_l(t) of a round, with the decay by round and the schedule over the planned rounds."""
    rate, schedule = config.local.learning_rate_in(round_), rate_schedule(config.local.round_schedule)
    return rate if schedule.constant else rate * schedule.factor(round_, config.horizon)


def local_in(config: RunConfig, algorithm: fl.Algorithm, round_: int) -> LocalSection:
    """The local training of a round: with the number of steps that is drawn for it, if the method skips at random."""
    if not algorithm.skipping:
        return config.local
    steps = drawn_steps(algorithm.skipping, config.seed, round_, MAX_COUNT)
    return config.local.model_copy(update={"steps": steps, "epochs": None})


def round_info(config: RunConfig, round_: int, cohort_size: int) -> fl.RoundInfo:
    """What the method is told of a round."""
    return fl.RoundInfo(
        round_,
        learning_rate_in(config, round_),
        previous_learning_rate=learning_rate_in(config, round_ - 1) if round_ else None,
        rounds=config.horizon,
        population=config.population or None,
        population_examples=config.population_examples or None,
        cohort_size=cohort_size,
        schedule=step_schedule(config, round_),
    )


def check_own_loop(config: RunConfig, algorithm: fl.Algorithm) -> None:
    """Raises InvalidInput unless method and local settings work with a training loop of the task's own."""
    own_steps = {"optimizer": not optimizer_spec(config.local).plain}
    own_steps |= {
        field: bool(getattr(config.local, field)) for field in ("schedule", "micro_batch_size", "continue_data")
    }
    for field, given in own_steps.items():
        if given:
            raise InvalidInput(
                f"local.{field}", "none for a task with a training loop of its own, which makes its own steps", "one"
            )
    if not (why := algorithm.loop_conflict(inexact=config.local.inexact)):
        return
    remedy = "" if algorithm.no_loop else ", or local.inexact = true to use it without its guarantees"
    raise InvalidInput(
        "algorithm.name",
        f"a method of plain local steps for a task that has its own training loop, such as fedavg{remedy}",
        f"{algorithm.name}: {why}",
    )


def complete(config: RunConfig) -> RunConfig:
    """The configuration with its defaults filled in, as it is stored and shown.

    Raises:
        AlgorithmError: the method or its parameters are unknown or invalid.
    """
    parameters = dict(fl.build(config.algorithm.name, **config.algorithm.parameters).parameters)
    algorithm = config.algorithm.model_copy(update={"parameters": parameters})
    return config.model_copy(update={"algorithm": algorithm, "planned_rounds": config.horizon})


def keeps_client_state(config: RunConfig, algorithm: fl.Algorithm) -> bool:
    """Whether each client of the run keeps a state of its own from round to round."""
    kept = algorithm.keeps_client_state, bool(config.personal), config.encodings.sparse, config.local.continue_data
    return any(kept)


def algorithm_in(config: RunConfig, algorithm: fl.Algorithm, round_: int) -> fl.Algorithm:
    """The run's method with its parameters of a round. algorithm: of `build_algorithm`."""
    made = fl.at_round(algorithm, _schedules(config), round_, config.horizon)
    return made if made is algorithm else with_optimizer(made, optimizer_spec(config.local))


def parameters_in(config: RunConfig, algorithm: fl.Algorithm, round_: int) -> dict[str, float | int | str | bool]:
    """The parameters of a round for a client. Clients read the values; they need no schedules."""
    return fl.values_in(algorithm.parameters, _schedules(config), round_, config.horizon)


def check_schedules(sections: Mapping[str, ScheduleSection], algorithm: fl.Algorithm, rounds: int) -> None:
    """Raises AlgorithmError, which names the schedule, unless the method can have these over so many planned rounds."""
    for name, section in sections.items():
        try:
            fl.check_schedules(algorithm, {name: _schedule(section)}, rounds)
        except fl.AlgorithmError as error:
            raise fl.AlgorithmError(f"schedules.{name}: {error}") from None


def _schedules(config: RunConfig) -> dict[str, fl.Schedule]:
    return {name: _schedule(section) for name, section in config.algorithm.schedules.items()}


def _schedule(section: ScheduleSection) -> fl.Schedule:
    return fl.Schedule(**dict(section))


def outside_names(config: RunConfig) -> str:
    """What of a run's code is from outside, for messages; empty if all of it is built in."""
    method, round_ = config.algorithm.name, config.round
    parts = [f"algorithm {method}"] * (method not in fl.names())
    parts += [f"reducer {round_.reducer}"] * (round_.reducer not in fl.BUILT_IN_REDUCERS)
    if round_.staleness is not None:
        parts += [f"staleness {round_.staleness.kind}"] * (round_.staleness.kind not in fl.BUILT_IN_STALENESS)
    return " and ".join(parts)


def update_encoding(config: RunConfig) -> EncodingSpec:
    """The encoding of a run's updates."""
    section = config.encodings
    return EncodingSpec(section.update, section.fraction or 0.0)


def known_part(
    config: RunConfig, algorithm: fl.Algorithm, round_: int, direction: fl.Tensors | None
) -> KnownPart | None:
    """The part of a delta that `direction` makes in a run's fixed number of steps; None if there is none."""
    reference = reference_of(algorithm, 0, direction)
    if reference is None or config.local.steps is None:
        return None
    return _known(config, reference, round_, config.local.steps)


def _known(config: RunConfig, reference: Reference, round_: int, steps: int) -> KnownPart:
    settings = fl.LocalSettings(learning_rate_in(config, round_), schedule=step_schedule(config, round_))
    return KnownPart(reference, reference.scale(settings, steps))


class References:
    """The references of the exchanges of one round: of the latest one whose bundles were made."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._round = -1
        self._known: dict[int, Reference | None] = {}
        """The known part of the deltas, by exchange."""

    def prepare(self, algorithm: fl.Algorithm, round_: int, exchange: int, direction: fl.Tensors | None) -> None:
        """Compute the reference of an exchange.

        algorithm: with its parameters of the round. direction: as the clients receive it.
        """
        if round_ != self._round:
            self._round, self._known = round_, {}
        self._known[exchange] = reference_of(algorithm, exchange, direction)

    def of_client(self, round_: int, exchange: int, steps: int) -> KnownPart | None:
        """What to add to the sent values of a client with so many steps. None: they are the delta."""
        if self._config.encodings.reference == "none":
            return None
        if round_ != self._round or exchange not in self._known:
            raise RuntimeError(
                f"expected the bundles of round {round_}, exchange {exchange}, to be made before updates"
            )
        reference = self._known[exchange]
        return None if reference is None else _known(self._config, reference, round_, steps)


def check_local_steps(config: RunConfig, algorithm: fl.Algorithm, *, own_loop: bool) -> None:
    """Raises InvalidInput unless the local steps suit the method, and a reference that clients are to leave out.

    own_loop: the task has a training loop of its own.
    """
    if own_loop:
        if config.record_privacy is not None:
            raise InvalidInput(
                "privacy", "none for a task with a training loop of its own, whose steps cannot be made private", "one"
            )
        check_own_loop(config, algorithm)
    section = config.encodings
    if section.reference == "none":
        return
    why = ""
    if section.update == "plain":
        why = 'with update = "plain", which has no error that a reference could reduce'
    elif own_loop or not optimizer_spec(config.local).plain:
        why = "unless clients make plain SGD steps, which are linear in the direction"
    elif not has_reference(algorithm):
        why = f"with {algorithm.name}, whose clients add no direction of the server to their steps"
    elif algorithm.objective != "uniform":
        why = 'with objective = "examples": the reference would differ among clients'
    if why:
        raise InvalidInput("encodings.reference", f'"none" {why}', section.reference)
