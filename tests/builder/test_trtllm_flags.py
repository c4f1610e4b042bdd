"""Flags of the removed trtllm-build: every one of them has an outcome, and none is swallowed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from builder import cli
from builder.trtllm_flags import FLAGS, HONOURED, MAPPED, REFUSED, table, translate
from runtime.errors import BuildError

# As trtllm-build listed them in its last release.
TEXT = """
checkpoint_dir model_config build_config model_cls_file model_cls_name max_batch_size max_input_len max_seq_len
max_decoder_seq_len max_beam_width max_num_tokens opt_num_tokens max_encoder_input_len max_prompt_embedding_table_size
max_multimodal_len kv_cache_type paged_kv_cache input_timing_cache output_timing_cache profiling_verbosity strip_plan
weight_sparsity weight_streaming fast_build workers log_level enable_debug_output visualize_network dry_run monitor_memory
logits_dtype gather_context_logits gather_generation_logits gather_all_token_logits lora_dir lora_ckpt_source
lora_target_modules max_lora_rank speculative_decoding_mode max_draft_len bert_attention_plugin gpt_attention_plugin gemm_plugin
gemm_swiglu_plugin fp8_rowwise_gemm_plugin lookup_plugin lora_plugin moe_plugin mamba_conv1d_plugin nccl_plugin context_fmha
context_fmha_fp32_acc remove_input_padding tokens_per_block use_paged_context_fmha use_fp8_context_fmha multiple_profiles
paged_state streamingllm reduce_fusion user_buffer
"""


def test_every_flag_has_one_outcome():
    names = [name for flag in FLAGS for name in flag.names]
    assert sorted(names) == sorted(TEXT.split())
    assert {flag.outcome for flag in FLAGS} == {MAPPED, HONOURED, REFUSED}
    assert [row[0] for row in table()] == [f"--{name}" for name in names]
    assert all(text for _, _, text in table())


def test_sizes_become_our_flags_and_notes_say_what_needs_none():
    found = translate(
        ["--checkpoint_dir", "model", "--output_dir", "out", "--max_batch_size=16", "--max_num_tokens", "256",
         "--max_seq_len", "1024", "--gemm_plugin", "auto", "--monitor_memory", "--precision", "fp8"]
    )  # fmt: skip
    assert found.argv == [
        "model", "--output_dir", "out", "--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--max-model-len", "1024",
        "--precision", "fp8",
    ]  # fmt: skip
    assert [note.split(":")[0] for note in found.notes] == ["--gemm_plugin auto", "--monitor_memory"]


def test_the_result_is_what_builder_build_parses():
    argv = translate(
        ["--checkpoint_dir", "m", "--output_dir", "o", "--max_batch_size", "4", "--input_timing_cache", "t.cache",
         "--profiling_verbosity", "detailed", "--fast_build"]
    ).argv  # fmt: skip
    arguments = cli.parser().parse_args(["build", *argv])
    assert (arguments.model, arguments.max_num_seqs, arguments.timing_cache) == ("m", 4, Path("t.cache"))
    assert (arguments.detailed_profiling, arguments.optimization_level) == (True, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kv_cache_type", "continuous"], r"--kv_cache_type continuous is not available: .*always paged \(accepted: paged\)"),
        (["--max_beam_width=4"], r"--max_beam_width 4 .*the width is 1"),
        (["--strip_plan"], r"--strip_plan is not available: a plan carries its weights"),
        (["--weight_streaming"], r"CUDA graphs exclude each other"),
        (["--tokens_per_block", "32"], r"blocks of 64 tokens"),
        (["--profiling_verbosity", "loud"], r"is 'loud' but must be one of layer_names_only, none, detailed"),
        (["--max_batch_size"], r"--max_batch_size needs a value"),
        (["--max_batch_size", "--fast_build"], r"--max_batch_size needs a value"),
    ],
)
def test_refusals_say_why(words, message):
    with pytest.raises(BuildError, match=message):
        translate(words)


def test_every_refused_flag_names_a_reason_of_its_own():
    for flag in FLAGS:
        for name in flag.names:
            if flag.outcome == REFUSED:
                with pytest.raises(BuildError, match=re.escape(flag.reason)):
                    translate([f"--{name}", *(["x"] if flag.takes_value else [])])


def test_the_command_line_reports_a_refused_flag(capsys):
    assert cli.main(["build", "--checkpoint_dir", "m", "--output_dir", "o", "--strip_plan"]) == 2
    assert "--strip_plan is not available" in capsys.readouterr().err


def test_other_flags_and_their_values_are_left_alone():
    words = ["model", "--output", "o", "--set", "max_batch_size=3", "--kv-cache-dtype", "f8"]
    assert translate(words).argv == words
