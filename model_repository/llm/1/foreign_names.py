"""Names that other servers' requests use, and what they mean here: data, and how to look it up.

They come from OpenAI's API, vLLM, TGI, llama.cpp, ollama, text-generation-webui, transformers' GenerationConfig and
TensorRT-LLM. Each is a synonym of a parameter of ours, or asks for something that is not done here: then the values
that ask for nothing pass, and all others are refused with the reason. It does not know where in a request a name stood.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_LONGEST_NEUTRAL = 256  # characters of JSON text that may ask for nothing


@dataclass(frozen=True, slots=True)
class Synonym:
    """The same as `ours`, once `convert` has made its value one of ours; None then stands for "not given"."""

    ours: str
    convert: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True, slots=True)
class Refused:
    """Not done here, for this `reason`, unless the value is one of `neutral`, which ask for nothing.

    Null, an empty text and an empty list ask for nothing under any name; an empty object may be a schema of any JSON.
    """

    reason: str
    neutral: tuple[Any, ...] = ()

    def passes(self, value: Any) -> bool:
        """Whether `value`, or the JSON that it spells, asks for nothing."""
        meant = _spelt(value)
        if meant is None or (isinstance(meant, str | list | tuple) and not meant):
            return True
        return any(meant == fine and isinstance(meant, bool) == isinstance(fine, bool) for fine in self.neutral)


def _spelt(value: Any) -> Any:
    if not isinstance(value, str) or len(value) > _LONGEST_NEUTRAL:
        return value
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(value, value))
    except (ValueError, RecursionError):
        return value


def _unless_negative(value: Any) -> Any:
    """llama.cpp's and ollama's -1 (until the answer ends) and -2 (until the context is full) mean no limit of ours."""
    return None if str(value) in ("-1", "-2", "-1.0", "-2.0") else value


def _top(value: Any) -> Any:
    """Ask for no probabilities beside the chosen token's by 0, which OpenAI, TGI and llama.cpp take for none at all."""
    return None if str(value) in ("0", "0.0") else value


_ONE = "one answer is made per request; send several requests, with different seeds"
_BEAMS = "beam search is not done here"
_GUIDED = "guided decoding is not done here"
_SAMPLER = "this way of sampling is not done here; top_k, top_p and min_p are"
_REPEATS = "this penalty is not done here; repetition_penalty, presence_penalty and frequency_penalty are"
_PROMPT_LOGPROBS = "only the answer's tokens have logprobs"
_LOGITS = "logits are not sent; ask for logprobs"
_INPUT = "it is an input of its own: send it beside the prompt"
_PROMPT = "the prompt is sent as text_input, messages or input_ids"
_TEXT = "text is always sent as the tokenizer decodes it"
_SERVER = "it is a setting of the server (config.pbtxt), not of a request"
_ECHO = "the prompt comes back where the input exclude_input_in_output is false and stream is false"
_MEDIA = "text is all that is read and written here"
_TRUNCATE = "a prompt that does not fit is refused, never cut"
_WEIGHTS = "one set of weights is served, without adapters"
_MARK = "answers bear no watermark"
_LENGTH = "it counts the prompt too: send max_tokens, which counts the answer's tokens alone"

_SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "max_tokens": ("max_new_tokens", "max_completion_tokens", "max_output_tokens", "request_output_len"),
    "min_tokens": ("min_new_tokens",),
    "temperature": ("temp",),
    "top_k": ("runtime_top_k",),
    "top_p": ("runtime_top_p",),
    "seed": ("random_seed",),
    "repetition_penalty": ("repeat_penalty", "rep_pen"),
    "stop": ("stop_words", "stop_sequences", "stop_sequence", "stop_strings"),
    "return_logprobs": ("return_log_probs",),
    "end_id": ("eos_token_id",),
}

_PASSING: Mapping[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    _ONE: ((1,), ("n", "best_of", "num_return_sequences")),
    _BEAMS: ((1,), ("num_beams", "beam_width", "num_beam_groups")),
    f"{_BEAMS} (false)": ((False,), ("use_beam_search",)),
    "early_stopping, length and diversity penalties belong to beam search, which is not done here": (
        (0, 1, False),
        ("early_stopping", "length_penalty", "len_penalty", "diversity_penalty", "beam_search_diversity_rate"),
    ),
    _GUIDED: (
        ({"type": "text"}, "text"),
        (
            *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice"),
            *("guided_grammar", "guided_decoding", "guided_decoding_backend", "guided_whitespace_pattern"),
            *("guided_decoding_guide_type", "guided_decoding_guide", "structural_tag", "grammar", "json_schema"),
            *("format", "constraints", "force_words_ids", "allowed_token_ids", "logits_processors"),
            *("logits_processor", "prefix_allowed_tokens_fn", "web_search_options", "prediction"),
        ),
    ),
    f"{_SAMPLER} (1 switches it off)": ((1,), ("typical_p", "typical", "tfs_z", "tfs", "smoothing_curve")),
    f"{_SAMPLER} (0 switches it off)": (
        (0, False),
        (
            *("top_a", "mirostat", "mirostat_mode", "epsilon_cutoff", "eta_cutoff", "penalty_alpha", "dynatemp_range"),
            *("xtc_probability", "smoothing_factor", "dynamic_temperature", "temperature_last", "top_n_sigma", "top_h"),
            *("min_keep", "top_p_min", "token_healing", "adaptive_target"),
        ),
    ),
    f"{_SAMPLER} (it needs top_p to change, and 1 leaves it)": ((1,), ("top_p_decay",)),
    "stages of sampling have one order (docs/requests.md)": ((), ("samplers", "sampler_seq", "sampler_order")),
    _REPEATS: (
        (0, False),
        (
            *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "dry_multiplier"),
            *("exponential_decay_length_penalty", "repetition_detection"),
        ),
    ),
    f"{_REPEATS} (1 switches it off)": ((1,), ("encoder_repetition_penalty",)),
    "penalties count all tokens, the prompt's for repetition_penalty too (-1)": (
        (-1,),
        ("repeat_last_n", "repetition_penalty_range", "penalty_last_n", "rep_pen_range"),
    ),
    "a line break is a token like any other (true)": ((True,), ("penalize_nl", "penalize_newline")),
    "answers are made without a second prompt (1 switches it off)": ((1,), ("guidance_scale", "cfg_scale")),
    "answers are made without a second prompt": ((), ("negative_prompt",)),
    "tokens are forbidden by bad_words or logit_bias": (
        (),
        (
            *("bad_words_ids", "bad_words_token_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"),
            *("embedding_bias_words", "embedding_bias_weights", "custom_token_bans"),
        ),
    ),
    "ignore_eos goes on behind the end of the answer; EOS itself is not forbidden": ((False,), ("ban_eos_token",)),
    "the first and the last token are the model's own choice": (
        (),
        ("forced_bos_token_id", "forced_eos_token_id", "forced_decoder_ids", "decoder_start_token_id"),
    ),
    _LENGTH: ((), ("max_length",)),
    "it counts the prompt in some APIs: send min_tokens, which counts the answer's tokens alone": (
        (0,),
        ("min_length",),
    ),
    "a request's time is the server's max_request_seconds and the client's own clock": (
        (0, -1),
        ("max_time", "t_max_predict_ms", "t_max_prompt_ms"),
    ),
    "end an answer by stop, stop_token_ids or max_tokens": (
        (-1,),
        ("stopping_criteria", "thinking_token_budget", "thinking_budget_tokens", "reasoning_budget"),
    ),
    "end an answer by stop (0 switches it off)": ((0,), ("n_indent",)),
    _PROMPT_LOGPROBS: ((False,), ("prompt_logprobs", "decoder_input_details", "return_prompt_logprobs")),
    _LOGITS: (
        (False, 0),
        (
            *("output_scores", "output_logits", "output_attentions", "output_hidden_states"),
            *("return_context_logits", "return_generation_logits", "post_sampling_probs", "return_hidden_states"),
        ),
    ),
    "logprobs come as one object per token": ((False,), ("flat_logprobs",)),
    _ECHO: ((False,), ("echo", "return_full_text")),
    "text behind the gap is not read; send the prompt alone": ((), ("suffix", "input_suffix", "input_extra")),
    _TEXT: ((True,), ("detokenize", "clean_up_tokenization_spaces", "return_text")),
    f"{_TEXT}, without spaces of its own": ((True, False), ("spaces_between_special_tokens",)),
    "text comes as what is new, token by token; a whole answer where the input stream is false": (
        (1, "DELTA", "delta"),
        ("output_kind",),
    ),
    _TRUNCATE: ((0, -1, False), ("truncate_prompt_tokens", "truncate", "num_keep", "n_keep", "truncation")),
    "send add_special_tokens": ((True,), ("add_bos_token",)),
    "send tools": ((), ("functions",)),
    "send tools; a call cannot be forced": (("none", "auto"), ("function_call",)),
    "whether calls are made in parallel is the model's choice": ((True,), ("parallel_tool_calls",)),
    _MEDIA: (
        (["text"],),
        ("modalities", "audio", "images", "image_data", "multi_modal_data", "mm_processor_kwargs", "image_input"),
    ),
    "prompts come as text or ids": ((), ("prompt_embeds", "inputs_embeds", "prompt_embedding_table")),
    _MARK: ((False,), ("watermark", "watermarking_config")),
    _WEIGHTS: ((), ("lora_name", "lora_request", "lora_task_id", "lora", "adapter_id", "prompt_vocab_size")),
    "the chat template is the model's own": ((), ("chat_template", "template", "prompt_template")),
    "the system prompt is a message of role system": ((), ("system", "system_prompt")),
    "how long an answer should be is said in the prompt": (("medium",), ("verbosity",)),
    "answers are not kept": ((False,), ("store", "background", "previous_response_id", "conversation")),
    "priorities are 1 to 3: send llm_priority": (("auto", "default"), ("service_tier",)),
    _SERVER: (
        (),
        (
            *("num_ctx", "num_batch", "num_gpu", "num_thread", "main_gpu", "low_vram", "keep_alive"),
            *("max_context", "max_sequences", "kv_tokens", "block_size"),
        ),
    ),
    _PROMPT: ((), ("prompt", "inputs", "input", "prompt_token_ids", "query")),
    _INPUT: (
        (),
        (
            *("text_input", "messages", "input_ids", "sampling_parameters", "operation", "exclude_input_in_output"),
            *("resume_token_ids", "resume_fingerprint", "template_time"),
        ),
    ),
    f"{_INPUT} (true is what it is without)": ((True,), ("stream",)),
}

NO_EFFECT = frozenset(
    (
        *("user", "stream_options", "metadata", "safety_identifier", "prompt_cache_key"),
        # Switched on by another name, which is refused.
        *("mirostat_tau", "mirostat_eta", "dynatemp_exponent", "xtc_threshold", "adaptive_decay"),
        *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "top_p_reset_ids"),
        # Only about speed, or about what is sent in any case.
        *("use_cache", "cache_prompt", "id_slot", "details", "timings_per_token", "return_tokens", "return_progress"),
        *("return_dict_in_generate", "return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"),
        *("return_perf_metrics", "return_token_ids", "return_tokens_as_token_ids"),
        # Nothing is padded, and a prompt has a beginning.
        *("pad_id", "pad_token_id", "bos_token_id"),
    )
)

FOREIGN: Mapping[str, Synonym | Refused] = {
    **{name: Synonym(ours) for ours, names in _SYNONYMS.items() for name in names},
    **{name: Synonym("max_tokens", _unless_negative) for name in ("num_predict", "n_predict")},
    **{name: Synonym("logprobs", _top) for name in ("top_logprobs", "top_n_tokens", "n_probs")},
    **{name: Refused(reason, neutral) for reason, (neutral, names) in _PASSING.items() for name in names},
}
