"""Parity of a real transformers Trainer, of loops with Accelerate, and of losses shaped as those of verl and TRL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from support.libraries import need
from support.parity_cases import ManualCase, TokenCase, Tokens, codes, count_tokens, find, token_batch, token_losses

from syncheck.parity.check import check_parity

if TYPE_CHECKING:
    from syncheck.testing import Rank

pytestmark = pytest.mark.syncheck(ranks=2)


def make_trainer_case(averages: bool) -> Any:
    """Return a case with a Llama. averages: whether tokens are counted over all ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from syncheck.integrations.transformers import TrainerParity

    class Mine(TrainerParity):
        trainer_batch_size = 2

        def build(self) -> Any:
            torch.manual_seed(0)
            return LlamaForCausalLM(
                LlamaConfig(
                    hidden_size=16,
                    intermediate_size=32,
                    num_hidden_layers=1,
                    num_attention_heads=2,
                    num_key_value_heads=1,
                    vocab_size=20,
                )
            )

        def batch(self) -> Any:
            inputs, labels = token_batch()
            # The first label has no prediction, but the Trainer counts it.
            labels[:, 0] = -100
            return {"input_ids": inputs, "labels": labels}

        def loss_terms(self, model: Any, batch: Any) -> torch.Tensor:
            # The models of transformers compute their loss in float32, also with parameters in float64.
            logits = model(input_ids=batch["input_ids"]).logits[:, :-1].float()
            return token_losses(logits, batch["labels"][:, 1:])

        def ignored(self, batch: Any) -> torch.Tensor:
            return batch["labels"][:, 1:] == -100

        def build_trainer(self, model: Any) -> Any:
            batch = self.batch()
            samples = [{name: tensor[i] for name, tensor in batch.items()} for i in range(8)]
            arguments = TrainingArguments(
                output_dir="unused",
                use_cpu=True,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                max_steps=1,
                max_grad_norm=0,
                train_sampling_strategy="sequential",
                average_tokens_across_devices=averages,
                report_to="none",
                disable_tqdm=True,
                save_strategy="no",
                logging_strategy="no",
            )
            return Trainer(model, arguments, train_dataset=samples)

    return Mine()


def test_trainer(syncheck_rank: Rank, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer counts tokens over micro-batches and ranks; without the count over ranks, it is a mean of means."""
    need("transformers")
    need("accelerate")
    monkeypatch.chdir(tmp_path)
    report = check_parity(make_trainer_case(averages=True))
    assert codes(report) == [], report.findings[0].evidence + str(report.groups[0].notes[0])
    report = check_parity(make_trainer_case(averages=False))
    assert codes(report) == ["SYN442"], report.findings[0].evidence
    assert find(report, "SHARE")["level"] == "rank"


def make_accelerate_case(divisor: str) -> Any:
    """Return a case with Accelerate. divisor: `all`, or `own` for the tokens of the micro-batch."""
    from accelerate import Accelerator

    from syncheck.integrations.accelerate import AccelerateParity

    class Mine(AccelerateParity, TokenCase):
        micro_batches = 2

        def accelerator(self) -> Any:
            return Accelerator(cpu=True, gradient_accumulation_steps=self.micro_batches)

        def loss(self, model: Any, part: Any, batch: Any) -> torch.Tensor:
            inputs, targets = part
            total = token_losses(model(inputs), targets).sum()
            if divisor == "own":
                return total / count_tokens(targets)
            # Accelerate divides by the accumulation, and DDP by the number of ranks.
            return total / count_tokens(batch[1]) * self.micro_batches * dist.get_world_size()

    return Mine(2)


def test_accelerate(syncheck_rank: Rank) -> None:
    """The recipe of Accelerate's documentation passes, and a mean for each micro-batch is a mean of means."""
    need("accelerate")
    assert codes(check_parity(make_accelerate_case("all"))) == []
    report = check_parity(make_accelerate_case("own"))
    assert (codes(report), find(report, "SHARE")["level"]) == (["SYN442"], "rank and micro-batch")


class PolicyLoss(ManualCase):
    """A policy gradient over the tokens of responses, aggregated as verl and TRL do.

    aggregation: `token-mean` over all tokens; `seq-mean-token-mean` is a mean of means over sequences; `bnpo` divides
    by the tokens of this rank; `dr_grpo` divides by the tokens of full responses, which the case counts.
    """

    aggregation = "token-mean"

    def count(self, batch: Any) -> float | None:
        return batch[1].numel() if self.aggregation == "dr_grpo" else None

    def build(self) -> Any:
        torch.manual_seed(0)
        return Tokens()

    def loss_terms(self, model: Any, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        # The advantage of a response, here from its first token.
        advantages = 1 + inputs[:, :1] / 10
        return advantages * token_losses(model(inputs), targets)

    def backward(self, model: Any, batch: Any, mesh: Any) -> None:
        [part] = self.micro(batch)
        losses = self.loss_terms(model, part)
        divisors = {
            "token-mean": count_tokens(batch[1]),
            "bnpo": count_tokens(part[1]) * dist.get_world_size(),
            "dr_grpo": batch[1].numel(),
        }
        if self.aggregation in divisors:
            loss = losses.sum() / divisors[self.aggregation]
        else:
            lengths = (part[1] != -100).sum(1)
            loss = (losses.sum(1) / lengths).sum() / len(batch[1])
        loss.backward()
        self.reduce(model)


def test_losses_of_reinforcement_learning(syncheck_rank: Rank) -> None:
    """A token mean passes; a mean of the means of sequences is named, with the weight of each sequence."""
    case = PolicyLoss()
    assert codes(check_parity(case)) == []
    case.aggregation = "dr_grpo"
    assert codes(check_parity(case)) == []
    case.aggregation = "bnpo"
    report = check_parity(case)
    assert (codes(report), find(report, "SHARE")["level"]) == (["SYN442"], "rank")
    case.aggregation = "seq-mean-token-mean"
    report = check_parity(case)
    assert (codes(report), find(report, "SHARE")["level"]) == (["SYN442"], "sample")
    assert len(find(report, "SHARE")["parts"]) == 8
