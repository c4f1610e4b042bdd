"""The build report: what was fused, how many bytes each weight takes, what accuracy was lost, how much memory serving needs.

`report.json` holds everything; `report.html` shows it to a person. No figure here is computed, only laid out.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from builder.charts import bars
from runtime.contract import REPORT_JSON, strict_json

_LAYERS_SHOWN = 20


def write_report(root: Path, report: Mapping[str, Any]) -> None:
    (root / REPORT_JSON).write_text(strict_json(report, "the build report"), encoding="utf-8")
    (root / "report.html").write_text(to_html(report), encoding="utf-8")


def to_html(report: Mapping[str, Any]) -> str:
    title = html.escape(str(report.get("model", {}).get("name", "engine")))
    parts = [
        "<!doctype html><meta charset='utf-8'>",
        f"<title>{title}: build report</title>",
        "<style>body{font:15px/1.45 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "table{border-collapse:collapse;margin:.5rem 0 1.5rem}td,th{border-bottom:1px solid #ddd;padding:.25rem .8rem;"
        "text-align:left;vertical-align:top}h2{margin:1.6rem 0 .3rem}td{font-variant-numeric:tabular-nums}</style>",
        f"<h1>{title}</h1>",
    ]
    parts.append(_charts(report))
    for section, content in report.items():
        parts.append(f"<h2>{html.escape(section.replace('_', ' '))}</h2>{_table(content)}")
    return "\n".join(parts) + "\n"


def _charts(report: Mapping[str, Any]) -> str:
    accuracy = report.get("accuracy") or {}
    weights = report.get("weights") or {}
    layers = [(name, layer["sqnr_db"]) for name, layer in (weights.get("layers") or {}).items()]
    losses = [(name.replace("_", " "), part["mean_kl"]) for name, part in (accuracy.get("parts") or {}).items()]
    if "mean_kl" in accuracy and losses:
        losses.append(("the engine", accuracy["mean_kl"]))
    cache = list((accuracy.get("kv_cache_sqnr_db") or {}).items())
    classes = [(f"{name} ({entry['dtype']})", entry["num_bytes"] / 1e6) for name, entry in (weights.get("classes") or {}).items()]
    return (
        bars("Mean KL divergence from the unquantized model, each part with those above it", losses)
        + bars("Noisiest layers: signal above error", layers[:_LAYERS_SHOWN], " dB")
        + bars(
            "Noisiest of the KV cache: keys as queries see them, and values, above their rounding", cache[:_LAYERS_SHOWN], " dB"
        )
        + bars("Weights by class", classes, " MB")
    )


def _table(content: Any) -> str:
    if isinstance(content, Mapping):
        rows = "".join(f"<tr><th>{html.escape(str(k))}</th><td>{_table(v)}</td></tr>" for k, v in content.items())
        return f"<table>{rows}</table>" if rows else "none"
    if isinstance(content, list | tuple):
        return "<br>".join(_table(item) for item in content) or "none"
    if isinstance(content, float):
        return f"{content:.6g}"
    return html.escape(str(content))


def _emulated(report: Mapping[str, Any]) -> str:
    return " (emulated: judges accuracy, not speed)" if report.get("compiled", {}).get("emulated") else ""


def _arithmetic(report: Mapping[str, Any]) -> str:
    in_bf16 = report["target"] == "cpu" and report.get("compiled", {}).get("arithmetic") == "bf16"
    return ", arithmetic bf16 (tokens may depend on the batch)" if in_bf16 else ""


def _checkpoint(stored: Mapping[str, Any]) -> str:
    """What became of the weights of a quantized checkpoint."""
    parts = [f"{stored['kept']} kept on their grid"]
    if reasons := Counter(stored["requantized"].values()):
        parts.append(
            f"{reasons.total()} rounded anew (" + "; ".join(f"{count}: {why}" for why, count in reasons.most_common()) + ")"
        )
    if stored["dequantized"]:
        parts.append(f"{stored['dequantized']} dequantized")
    if stored["unquantized"]:
        parts.append(f"{len(stored['unquantized'])} left unquantized as there")
    return f"{stored['num_weights']} weights quantized by {stored['format']}: " + ", ".join(parts)


def _bytes_per_weight(weights: Mapping[str, Any]) -> str:
    """Of the layers alone, which a scheme's bits promise, and of everything with the tables, which a small model has much of."""
    tables = [name for name in ("embedding", "lm_head") if name in weights["classes"]]
    dtypes = " and ".join(dict.fromkeys(weights["classes"][name]["dtype"] for name in tables))
    whole = "embedding and head" if len(tables) == 2 or weights["tied_embedding"] else "embedding"
    text = f"{weights['layers_bytes_per_weight']:.2f} bytes/weight in the layers, {weights['bytes_per_weight']:.2f}"
    return f"{text} with the {dtypes} {whole}" if tables else f"{text} in all"


def summary(report: Mapping[str, Any]) -> str:
    """The lines `builder build` and `builder inspect` print."""
    model, weights, memory = report["model"], report["weights"], report["memory"]
    lines = [
        f"model       {model['name']} ({model['architecture']}, {model['num_parameters'] / 1e6:.1f} M parameters)",
        f"target      {report['target']}, precision {report['precision']}{_emulated(report)}{_arithmetic(report)}, "
        f"KV cache {memory['key_dtype']}:{memory['value_dtype']}{' with scales of 1' if memory.get('unit_scales') else ''}, "
        f"block {memory['block_size']}",
        f"weights     {weights['total_bytes'] / 1e6:.1f} MB: {_bytes_per_weight(weights)}",
        *(
            f"            {name:<11} {entry['bytes_per_weight']:.3f} bytes per weight ({entry['dtype']})"
            for name, entry in weights["classes"].items()
        ),
        f"nodes       {report['fusion']['nodes_before']} exported, {report['fusion']['nodes_after']} fused: "
        + ", ".join(f"{name} {count}" for name, count in report["fusion"]["counts"].items() if count),
        f"KV memory   {memory['kv_bytes_per_token']} bytes per token, "
        f"{memory['kv_bytes_per_sequence'] / 1e6:.1f} MB per sequence of {memory['max_model_len']} tokens",
    ]
    if plans := report.get("plans"):
        sizes = (
            f"{arch} {plan['plan_bytes'] / 1e6:.1f} MB, {plan['attention_plugins']} attention plugins"
            for arch, plan in plans.items()
        )
        lines.append("plans       " + "; ".join(sizes))
    accuracy = report.get("accuracy") or {}
    if stored := weights.get("checkpoint"):
        lines.append(f"checkpoint  {_checkpoint(stored)}")
    worst = list((weights.get("layers") or {}).items())[:3]
    if worst:
        lines.append("noisiest    " + ", ".join(f"{name} {layer['sqnr_db']:.1f} dB" for name, layer in worst))
    if accuracy:
        text = f"accuracy    perplexity {accuracy['perplexity']:.3f}"
        if "reference_perplexity" in accuracy:
            text += (
                f", fp32 {accuracy['reference_perplexity']:.3f} (ratio {accuracy['perplexity_ratio']:.4f}), "
                f"KL {accuracy['mean_kl']:.5f}, top-1 agreement {accuracy['top1_agreement']:.4f}"
            )
        lines.append(text + f", on {accuracy['num_tokens']} held-out tokens")
        if accuracy.get("parts"):
            named = (f"{name.replace('_', ' ')} {part['mean_kl']:.5f}" for name, part in accuracy["parts"].items())
            lines.append("            KL with, in turn, " + ", ".join(named))
        if noisy := list((accuracy.get("kv_cache_sqnr_db") or {}).items())[:3]:
            lines.append("            noisiest of the KV cache " + ", ".join(f"{name} {db:.1f} dB" for name, db in noisy))
        if accuracy.get("fallback"):
            raised = accuracy["fallback"]["raised"]
            lines.append(
                f"fallback    {len(raised)} {'layers' if len(raised) > 1 else 'layer'} raised: "
                + ", ".join(f"{n} to {t}" for n, t in raised.items())
            )
    build = report.get("build") or {}
    if build:
        stages = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in build["seconds"].items())
        lines.append(f"build       {stages}; peak memory {build['peak_rss_bytes'] / 1e6:.0f} MB")
    return "\n".join(lines)
