"""Hugging Face's Trainer over smddp: finetunes a model to answer questions, and asks it one.

torchrun --nproc_per_node 2 examples/trainer_qa.py --output_dir runs/qa --report
"""

from __future__ import annotations

from pathlib import Path

import common
import torch
import torch.distributed as dist
from qa_answer import answer, scores
from qa_data import features, make_tokenizer, read_squad, write_squad
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import smp  # noqa: F401 # first of the two lines: registers the backend

QUESTION = "What is used for inference?"
CONTEXT = "My Name is Philipp and I live in Nuremberg. This model is used with sagemaker for inference."


class StepLog(TrainerCallback):
    def __init__(self, log: common.Log):
        self.log = log

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.log.step(logs["loss"])


def main() -> None:
    parser = common.parser(__doc__, steps=80, batch=8, width=64, layers=2)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/qa"))
    args = parser.parse_args()
    common.local_device()
    dist.init_process_group(args.backend)  # second of the two lines, before TrainingArguments
    if dist.get_rank() == 0:
        write_squad(args.output_dir)
    dist.barrier()
    train_rows, rows = (read_squad(args.output_dir / f"{name}.json") for name in ("train", "validation"))
    tokenizer = make_tokenizer(train_rows)

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=args.width, num_hidden_layers=args.layers, num_attention_heads=4,
        intermediate_size=4 * args.width, max_position_embeddings=48, initializer_range=0.1,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(args.output_dir), max_steps=args.steps, per_device_train_batch_size=args.batch,
        learning_rate=2e-3, warmup_steps=args.steps // 10, logging_steps=1, save_strategy="no", report_to=[],
        disable_tqdm=True, use_cpu=not torch.cuda.is_available(), seed=1, dataloader_pin_memory=False,
    )  # fmt: skip
    log = common.Log(args, args.batch * dist.get_world_size(), "samples")
    model = BertForQuestionAnswering(config)
    trainer = Trainer(model, arguments, train_dataset=features(train_rows, tokenizer), callbacks=[StepLog(log)])  # type: ignore[arg-type]
    trainer.remove_callback(PrinterCallback)  # the log prints the losses
    metrics = trainer.train().metrics
    trainer.save_model()  # rank 0 writes
    if trainer.is_world_process_zero():
        tokenizer.save_pretrained(args.output_dir)
        trainer.log_metrics("train", metrics)
        trainer.log_metrics("eval", scores(rows, args.output_dir))
        print(answer(args.output_dir, QUESTION, CONTEXT))
    log.finish()
    del trainer  # and DDP, before its group: the other way round gloo now and then hangs (pytorch#56297)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
