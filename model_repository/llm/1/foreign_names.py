"""Names that other servers' requests use, and what they mean here: data, and how to look it up.

They come from OpenAI's APIs, Anthropic's, Gemini's and Mistral's, vLLM, SGLang, TGI, llama.cpp, ollama,
text-generation-webui, transformers' GenerationConfig and TensorRT-LLM. Each is a synonym of a parameter of ours, or
asks for something that is not done here: then the values that ask for nothing pass, and all others are refused with the
reason. It does not know where in a request a name stood.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llm_engine.request import RequestError

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


def _thinking(value: Any) -> Any:
    """ollama's `think` is a truth, or for some models an effort."""
    if value in ("low", "medium", "high"):
        raise RequestError(f"think {value!r} is an effort here: send reasoning_effort")
    return value


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
_SPECULATION = "tokens are not guessed beforehand here"
_CACHE = "what is kept in the KV cache is the server's choice"
_PARTS = "send what it holds by name, in sampling_parameters"
_WHOLE = "text_output has all that the model writes: thoughts and tool calls are not taken apart"
_LENGTH = "it counts the prompt too: send max_tokens, which counts the answer's tokens alone"

_SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "max_tokens": (
        "max_new_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "request_output_len",
        "max_tokens_to_sample",
    ),
    "min_tokens": ("min_new_tokens",),
    "temperature": ("temp",),
    "top_k": ("runtime_top_k",),
    "top_p": ("runtime_top_p",),
    "seed": ("random_seed",),
    "repetition_penalty": ("repeat_penalty", "rep_pen"),
    "stop": ("stop_words", "stop_sequences", "stop_sequence", "stop_strings"),
    "return_logprobs": ("return_log_probs", "is_return_log_probs", "return_logprob"),
    "include_stop_str_in_output": ("no_stop_trim",),
    "end_id": ("eos_token_id",),
}

_PASSING: Mapping[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    _ONE: (
        (1,),
        ("n", "best_of", "num_return_sequences", "candidate_count", "best_of_sequences", "num_generations"),
    ),
    _BEAMS: ((1,), ("num_beams", "beam_width", "num_beam_groups")),
    f"{_BEAMS} (false)": ((False,), ("use_beam_search",)),
    "early_stopping, length and diversity penalties belong to beam search, which is not done here": (
        (0, 1, False),
        ("early_stopping", "length_penalty", "len_penalty", "diversity_penalty", "beam_search_diversity_rate"),
    ),
    f"{_GUIDED}; text is what is written": (
        ({"type": "text"}, "text", "text/plain"),
        ("response_format", "format", "response_mime_type"),
    ),
    _GUIDED: (
        (),
        (
            *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
            *("guided_decoding", "guided_decoding_backend", "guided_whitespace_pattern"),
            *("guided_decoding_guide_type", "guided_decoding_guide", "structural_tag", "grammar", "json_schema"),
            *("constraints", "force_words_ids", "allowed_token_ids", "logits_processors", "logits_processor"),
            *("prefix_allowed_tokens_fn", "web_search_options", "prediction", "regex", "ebnf"),
            *("response_schema", "response_json_schema", "custom_logit_processor", "custom_params"),
        ),
    ),
    f"{_SAMPLER} (1 switches it off)": ((1,), ("typical_p", "typical", "tfs_z", "tfs", "smoothing_curve")),
    f"{_SAMPLER} (0 switches it off)": (
        (0, False),
        (
            *("top_a", "mirostat", "mirostat_mode", "epsilon_cutoff", "eta_cutoff", "penalty_alpha", "dynatemp_range"),
            *("xtc_probability", "smoothing_factor", "dynamic_temperature", "temperature_last", "top_n_sigma", "top_h"),
            *("min_keep", "top_p_min", "token_healing", "adaptive_target", "dola_layers"),
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
            *("embedding_bias_words", "embedding_bias_weights", "custom_token_bans", "embedding_bias"),
            *("bad_words_list",),
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
        (
            *("stopping_criteria", "thinking_token_budget", "thinking_budget_tokens", "reasoning_budget"),
            *("thinking_budget", "max_think_tokens", "max_thinking_tokens", "stop_regex", "stop_words_list"),
        ),
    ),
    "end an answer by stop (0 switches it off)": ((0,), ("n_indent",)),
    _PROMPT_LOGPROBS: ((False,), ("prompt_logprobs", "decoder_input_details", "return_prompt_logprobs")),
    f"{_PROMPT_LOGPROBS}, from its first": ((-1,), ("logprob_start_len",)),
    "logprobs are the likeliest tokens' and the drawn one's": ((), ("token_ids_logprob",)),
    "the logprobs of an answer's tokens are not added up": ((False,), ("return_cum_log_probs",)),
    _LOGITS: (
        (False, 0),
        (
            *("output_scores", "output_logits", "output_attentions", "output_hidden_states"),
            *("return_context_logits", "return_generation_logits", "post_sampling_probs", "return_hidden_states"),
            *("is_return_context_logits", "is_return_generation_logits"),
        ),
    ),
    "logprobs come as one object per token": ((False,), ("flat_logprobs",)),
    _ECHO: ((False,), ("echo", "return_full_text")),
    f"{_ECHO} (true leaves it out)": ((True,), ("exclude_input_from_output",)),
    "text behind the gap is not read; send the prompt alone": ((), ("suffix", "input_suffix", "input_extra")),
    _TEXT: ((True,), ("detokenize", "clean_up_tokenization_spaces", "return_text")),
    f"{_TEXT}, without spaces of its own": ((True, False), ("spaces_between_special_tokens",)),
    "text comes as what is new, token by token; a whole answer where the input stream is false": (
        (1, "DELTA", "delta"),
        ("output_kind",),
    ),
    _TRUNCATE: (
        (0, -1, False, "disabled"),
        ("truncate_prompt_tokens", "truncate", "num_keep", "n_keep", "truncation", "n_discard"),
    ),
    "send add_special_tokens": ((True,), ("add_bos_token",)),
    "send tools": ((), ("functions",)),
    "send tools; a call cannot be forced": (("none", "auto"), ("function_call",)),
    "whether calls are made in parallel is the model's choice": ((True,), ("parallel_tool_calls",)),
    "how many calls are made is the model's choice": ((), ("max_tool_calls",)),
    f"{_MEDIA} (text)": ((["text"],), ("modalities",)),
    _MEDIA: (
        (),
        (
            *("audio", "images", "image_data", "multi_modal_data", "mm_processor_kwargs", "image_input", "image"),
            *("image_bytes", "image_url", "video_bytes", "video_url", "video_data", "audio_data"),
        ),
    ),
    "prompts come as text or ids": (
        (),
        ("prompt_embeds", "inputs_embeds", "input_embeds", "prompt_embedding_table", "prompt_table_extra_ids"),
    ),
    "models with an encoder are not served": (
        (),
        (
            *("decoder_input_ids", "decoder_input_lengths", "decoder_text_input", "encoder_input_features"),
            *("encoder_output_lengths", "cross_attention_mask"),
        ),
    ),
    "the prompt's length is that of input_ids": ((), ("input_lengths",)),
    "text_input is raw, and messages go through the chat template": ((False,), ("raw",)),
    "send the tokens of an earlier talk in input_ids": ((), ("context",)),
    _PARTS: (
        ({},),
        (
            *("options", "generation_config", "sampling_params", "sampling_config", "extra_body", "extra_args"),
            *("vllm_xargs", "nvext"),
        ),
    ),
    "send enable_thinking, or in chat_template_kwargs what the chat template reads": (
        (),
        ("thinking", "thinking_config"),
    ),
    "send reasoning_effort or enable_thinking": ((), ("reasoning",)),
    _WHOLE: (
        (False, "none"),
        ("separate_reasoning", "parse_tool_calls", "thinking_forced_open", "reasoning_format"),
    ),
    f"{_WHOLE} (true leaves thoughts in)": ((True,), ("include_reasoning", "reasoning_in_content", "stream_reasoning")),
    "every response has the same outputs; return_logprobs adds theirs": ((), ("include", "response_fields")),
    _SPECULATION: (
        (0, False, "none"),
        (
            *("draft_input_ids", "draft_logits", "num_draft_tokens", "draft_acceptance_threshold"),
            *("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size"),
            *("prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens"),
            *("speculative.n_max", "speculative.n_min", "speculative.p_min", "speculative.type"),
            *("speculative.ngram_size_n", "speculative.ngram_size_m", "speculative.ngram_m_hits"),
        ),
    ),
    _CACHE: (
        (0,),
        (
            *("retention_token_range_starts", "retention_token_range_ends", "retention_token_range_priorities"),
            *("retention_token_range_durations_ms", "retention_decode_priority", "retention_decode_duration_ms"),
            *("kv_cache_retention_config", "kv_transfer_params", "cache_implementation", "cache_config"),
            *("n_cache_reuse",),
        ),
    ),
    "an answer with NaN in its logits is an error": ((False,), ("remove_invalid_values",)),
    "no code of a request's is run": ((), ("custom_generate",)),
    "what is not given is the model's generation_config (true)": ((True,), ("use_model_defaults",)),
    "nothing is put before the prompt": ((False,), ("safe_prompt",)),
    "answers are not filtered": ((), ("safety_settings",)),
    _MARK: ((False,), ("watermark", "watermarking_config")),
    _WEIGHTS: (
        (),
        (
            *("lora_name", "lora_request", "lora_task_id", "lora", "adapter_id", "prompt_vocab_size", "lora_path"),
            *("lora_weights", "lora_config"),
        ),
    ),
    "the chat template is the model's own": ((), ("chat_template", "template", "prompt_template")),
    "the system prompt is a message of role system": (
        (),
        ("system", "system_prompt", "system_instruction", "instructions"),
    ),
    "how long an answer should be is said in the prompt": (("medium",), ("verbosity",)),
    "answers are not kept": ((False,), ("store", "background", "previous_response_id", "conversation")),
    "priorities are 1 to 3: send llm_priority": (("auto", "default"), ("service_tier",)),
    "send llm_priority, 1 (first) to 3; Triton's own priority is known to its queue alone, over gRPC": (
        (0,),
        ("priority",),
    ),
    _SERVER: (
        (),
        (
            *("num_ctx", "num_batch", "num_gpu", "num_thread", "main_gpu", "low_vram", "keep_alive"),
            *("max_context", "max_sequences", "kv_tokens", "block_size"),
        ),
    ),
    f"{_PROMPT}; {_GUIDED}": (
        (
            {},
            {"format": {"type": "text"}},
            {"verbosity": "medium"},
            {"format": {"type": "text"}, "verbosity": "medium"},
        ),
        ("text",),
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
    "send the input stream (true is what it is without)": ((True,), ("streaming",)),
}

NO_EFFECT = frozenset(
    (
        *("user", "stream_options", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        # Switched on by another name, which is refused.
        *("mirostat_tau", "mirostat_eta", "dynatemp_exponent", "xtc_threshold", "adaptive_decay"),
        *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "top_p_reset_ids"),
        *("grammar_lazy", "grammar_triggers"),
        # Only about speed, or about what is sent in any case.
        *("use_cache", "cache_prompt", "id_slot", "details", "timings_per_token", "return_tokens", "return_progress"),
        *("return_dict_in_generate", "return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"),
        *("return_perf_metrics", "return_token_ids", "return_tokens_as_token_ids"),
        *("is_return_perf_metrics", "return_kv_cache_reuse_stats", "prefill_chunk_size"),
        # Probabilities always add up to 1 when a token is drawn.
        "renormalize_logits",
        # Nothing is padded, and a prompt has a beginning.
        *("pad_id", "pad_token_id", "bos_token_id"),
    )
)

FOREIGN: Mapping[str, Synonym | Refused] = {
    **{name: Synonym(ours) for ours, names in _SYNONYMS.items() for name in names},
    **{name: Synonym("max_tokens", _unless_negative) for name in ("num_predict", "n_predict")},
    **{name: Synonym("logprobs", _top) for name in ("top_logprobs", "top_n_tokens", "n_probs", "top_logprobs_num")},
    "think": Synonym("enable_thinking", _thinking),
    **{name: Refused(reason, neutral) for reason, (neutral, names) in _PASSING.items() for name in names},
}
