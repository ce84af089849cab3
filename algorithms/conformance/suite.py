"""The laws of methods, as a class of tests: a subclass lists its cases. `plugin` has the fixtures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise
from random import Random
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load, save

import algorithms as fl
from algorithms import tree
from algorithms.conformance.cases import MethodCase, parametrize, skip_exempt
from algorithms.conformance.federation import (
    UNEVEN,
    Federation,
    RunState,
    assert_close,
    flat,
    mapped,
    parts,
    same,
    total,
)
from algorithms.conformance.plugin import PlayedRuns

DTYPES = (torch.float32, torch.float64)


class MethodLaws:
    """Every method satisfies these."""

    cases: ClassVar[Sequence[MethodCase]] = ()
    neutral: ClassVar[Sequence[MethodCase]] = ()
    """Settings that must equal FedAvg bit for bit. Their method has the parameter `weights`."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each law for each case."""
        parametrize(metafunc, {"case": self.cases, "neutral_case": self.neutral})

    def test_mean_of_one_client_is_its_own_update(self, federation: Federation, case: MethodCase) -> None:
        """A cohort of one: Dbar is that client's delta, bit for bit."""
        algorithm = case.build()
        client, delta = (
            federation.clients[1],
            federation.train(federation.clients[1], federation.x, fl.LocalRule()).delta,
        )
        row = algorithm.sums([client.info], federation.round_info())["Dbar"]
        [mean] = fl.weighted_sums_of_tensors([delta], [row.coefficients])
        assert all(torch.equal(delta[key], mean[key]) for key in delta)

    def test_order_of_arrival_changes_no_bit(
        self, federation: Federation, played: PlayedRuns, case: MethodCase
    ) -> None:
        """Updates are summed in the order of client ids, not of their arrival."""
        forward = played.of(federation, case)[-1]
        backward = federation.run(
            case.build(), [dataclasses.replace(round, arrange=lambda updates: updates[::-1]) for round in UNEVEN]
        )[-1]
        assert same(forward, backward)

    def test_names_of_clients_do_not_matter(self, federation: Federation, played: PlayedRuns, case: MethodCase) -> None:
        """With other ids, and so another order of summation, the state is the same to tolerance."""
        other = {"ada": "z", "bob": "y", "cyd": "x"}
        renamed = dataclasses.replace(
            federation, clients=[dataclasses.replace(client, name=other[client.name]) for client in federation.clients]
        )
        here, there = played.of(federation, case)[-1], renamed.run(case.build(), UNEVEN)[-1]
        assert_close(dataclasses.replace(here, clients={other[name]: own for name, own in here.clients.items()}), there)

    def test_scale_of_weights_does_not_matter(
        self, federation: Federation, played: PlayedRuns, case: MethodCase
    ) -> None:
        """With seven times the examples for every client the state is the same to tolerance. The weights sum to one."""
        algorithm = case.build()
        many = dataclasses.replace(
            federation,
            clients=[dataclasses.replace(c, A=c.A.repeat(7, 1), b=c.b.repeat(7)) for c in federation.clients],
        )
        assert_close(played.of(federation, case)[2], many.run(algorithm, UNEVEN[:3])[-1])
        assert sum(algorithm.weights([client.info for client in many.clients])) == pytest.approx(1)

    def test_inputs_stay_unchanged(self, federation: Federation, played: PlayedRuns, case: MethodCase) -> None:
        """Neither training nor the server step writes into the state, the direction or the updates it was given."""
        algorithm = case.build()
        before = played.of(federation, case)[1]
        standing = mapped(lambda tensors: tree.map(torch.clone, tensors), before)
        sent: list[Mapping[fl.Payload, fl.Tensors]] = []
        copies: list[Mapping[fl.Payload, fl.Tensors]] = []

        def watched(updates: list[fl.Update]) -> list[fl.Update]:
            sent.extend(payloads for _, payloads in updates)
            copies.extend(
                {p: tree.map(torch.clone, tensors) for p, tensors in payloads.items()} for _, payloads in updates
            )
            return updates

        federation.after(algorithm, standing, dataclasses.replace(UNEVEN[2], arrange=watched))
        assert same(before, standing)
        torch.testing.assert_close(sent, copies, rtol=0, atol=0)

    def test_dtype_and_device_are_kept(
        self, federation: Federation, played: PlayedRuns, case: MethodCase, device: str
    ) -> None:
        """Every tensor of server and clients is of the model's dtype, on its device."""
        for dtype in DTYPES:
            x = {name: tensor.to(device, dtype) for name, tensor in federation.x.items()}
            there = dataclasses.replace(federation, x=x)
            run = played.of(there, case)[:2] if device == "cpu" else there.run(case.build(), UNEVEN[:2])
            tensors = [tensor for part in parts(run[-1]).values() for tensor in part.values()]
            assert {(tensor.dtype, tensor.device.type) for tensor in tensors} == {(dtype, device)}

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_resumed_run_equals_the_uninterrupted_one(
        self, federation: Federation, played: PlayedRuns, case: MethodCase, dtype: torch.dtype
    ) -> None:
        """The state is complete: after a save and a load, with absent clients, the end is the same bit for bit."""
        algorithm = case.build()
        federation = dataclasses.replace(federation, x=tree.map(lambda tensor: tensor.to(dtype), federation.x))
        whole = played.of(federation, case)
        restored = mapped(lambda tensors: load(save(tensors)), whole[2])
        again = fl.build(algorithm.name, **algorithm.parameters)
        assert same(whole[-1], federation.run(again, UNEVEN[3:], restored)[-1])

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_neutral_setting_is_fedavg(
        self, federation: Federation, played: PlayedRuns, neutral_case: MethodCase, dtype: torch.dtype
    ) -> None:
        """With neutral settings and equal weights a method equals FedAvg bit for bit in every round."""
        federation = dataclasses.replace(
            federation,
            x=tree.map(lambda tensor: tensor.to(dtype), federation.x),
            settings=fl.LocalSettings(0.07, weight_decay=0.01),
        )
        fedavg = played.of(federation, MethodCase("fedavg", "fedavg", {"weights": "uniform"}))
        neutral = federation.run(neutral_case.build(weights="uniform"), UNEVEN)
        assert all(
            torch.equal(a.server.x[key], b.server.x[key])
            for a, b in zip(fedavg, neutral, strict=True)
            for key in a.server.x
        )

    def test_neutral_setting_never_reads_the_direction(self, federation: Federation, neutral_case: MethodCase) -> None:
        """A NaN in a direction that is switched off does not reach the client's model."""
        client = federation.clients[0]
        rule = neutral_case.build().local_rule(tree.full_like(federation.x, float("nan")))
        plain, neutral = (federation.train(client, federation.x, r).delta for r in (fl.LocalRule(), rule))
        assert all(torch.equal(plain[key], neutral[key]) for key in plain)

    def test_path_shifts_with_the_problem(self, federation: Federation, played: PlayedRuns, case: MethodCase) -> None:
        """Translation: moving every f_i and x_0 by one vector moves the whole path by it, and no memory."""
        skip_exempt(case, "translation")
        by = torch.tensor([3.0, -1.0, 2.0], dtype=torch.float64)
        heres, theres = played.of(federation, case), federation.shifted(by).run(case.build(), UNEVEN)
        for here, there in zip(heres, theres, strict=True):
            x = {"head": here.server.x["head"] + by[:2], "tail": here.server.x["tail"] + by[2]}
            assert_close(dataclasses.replace(here, server=here.server.replace(x=x)), there)

    def test_single_full_steps_reach_the_optimum(self, conditioned: Federation, case: MethodCase) -> None:
        """K = 1 with full batches and all clients: the minimiser of sum p_i f_i, where sum p_i grad f_i = 0."""
        skip_exempt(case, "optimum")
        algorithm, rounds = case.build(), case.rounds
        federation = dataclasses.replace(conditioned.with_steps(1), settings=fl.LocalSettings(0.4), planned=rounds)
        y = flat(federation.play(algorithm, rounds)[-1].x)
        p = algorithm.weights([client.info for client in federation.clients])
        if algorithm.objective == "examples":
            p = fl.example_weights([client.info for client in federation.clients])
        slope = total(p_i * client.gradient(y) for p_i, client in zip(p, federation.clients, strict=True))
        assert slope.norm() < 1e-8

    def test_cutting_into_blocks_changes_no_bit(self, case: MethodCase) -> None:
        """Sums of slices, cut anywhere, are the slices of the sums."""
        cohort = [fl.UpdateInfo(client, size, size) for client, size in (("a", 3), ("b", 7), ("c", 11))]
        info = fl.RoundInfo(0, 0.3, population=9, population_examples=70, cohort_size=3)
        rows = [s.coefficients for s in case.build().sums(cohort, info).values()]
        for seed in range(5):
            random = Random(seed)
            n = random.randint(1, 200)
            cuts = sorted({0, n, *(random.randint(0, n) for _ in range(random.randint(0, 6)))})
            blocks = list(torch.randn(3, n, generator=torch.Generator().manual_seed(seed)))
            whole = fl.weighted_sums(blocks, rows)
            pieces = [fl.weighted_sums((block[start:end] for block in blocks), rows) for start, end in pairwise(cuts)]
            assert all(torch.equal(total, torch.cat(parts)) for total, *parts in zip(whole, *pieces, strict=True))

    def test_clipped_update_equals_a_shorter_one(self, federation: Federation, case: MethodCase) -> None:
        """A delta admitted at a factor gives the server and client states of a delta of that length."""
        algorithm = case.build()
        clipped = dataclasses.replace(UNEVEN[0], clip={"bob": 0.25})

        def quartered(updates: list[fl.Update]) -> list[fl.Update]:
            return [
                (
                    dataclasses.replace(info, clip_factor=1.0),
                    {**sent, "delta": tree.scale(sent["delta"], info.clip_factor)} if "delta" in sent else sent,
                )
                for info, sent in updates
            ]

        by_factor = federation.run(algorithm, [clipped])[0].server
        by_hand = federation.run(algorithm, [dataclasses.replace(clipped, arrange=quartered)])[0].server
        assert_close(RunState(by_factor), RunState(by_hand))
