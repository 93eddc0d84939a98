// SPDX-License-Identifier: Apache-2.0

//! From requests of `ballast.worker.v1` to the engine's requests. The engine checks ranges.

use std::time::Duration;

use engine::{
    BeamParams, BeamRequest, DryBreakers, DryParams, EmbedRequest, MirostatParams, MirostatVersion, Request,
    RequestId, SamplerState, SamplingParams, ScoreKind, ScoreRequest, StopConditions, TOP_LOGPROBS_MAX,
};
use grammar::GrammarSource;
use models::Pooling;
use proto::v1 as public;
use proto::v1::grammar::Kind;
use proto::worker::v1 as wire;
use sampling_params::{DRY_BASE, IntegerDefault, MIROSTAT_ETA, MIROSTAT_TAU};

/// A field that the engine's request cannot represent.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RequestFieldError {
    #[error("prompt_tokens is {prompt_tokens}, but there are {tokens} tokens")]
    PromptTokens { prompt_tokens: u32, tokens: usize },
    #[error("top_logprobs is {asked}, allowed are 0 to {TOP_LOGPROBS_MAX}")]
    TopLogprobs { asked: u32 },
    #[error("grammar is empty")]
    EmptyGrammar,
    #[error("a beam search cannot follow a grammar")]
    BeamGrammar,
    #[error("a beam search begins without output, but {output_tokens} of {tokens} tokens are output")]
    BeamOutput { output_tokens: usize, tokens: usize },
    #[error("mirostat is {asked}, allowed are 0 to 2")]
    Mirostat { asked: u32 },
    #[error("sampler_state has {bytes} bytes, at most {} are allowed", SamplerState::BYTES_MAX)]
    SamplerState { bytes: usize },
}

/// `now` is the time on the engine's clock.
pub(crate) fn request_from_wire(
    wire: wire::GenerateRequest,
    id: RequestId,
    now: Duration,
) -> Result<Request, RequestFieldError> {
    let tokens = wire.tokens.len();
    let prior_output = tokens
        .checked_sub(wire.prompt_tokens as usize)
        .ok_or(RequestFieldError::PromptTokens { prompt_tokens: wire.prompt_tokens, tokens })?;
    let sampler_state = SamplerState::from_bytes(&wire.sampler_state)
        .ok_or(RequestFieldError::SamplerState { bytes: wire.sampler_state.len() })?;
    Ok(Request {
        id,
        prompt: wire.tokens,
        prior_output,
        sampling: sampling(wire.sampling.unwrap_or_default(), wire.dry_breakers.unwrap_or_default())?,
        stop: StopConditions {
            max_tokens: Some(wire.max_tokens).filter(|&max| max > 0),
            min_tokens: wire.min_tokens,
            stop_tokens: wire.stop_tokens,
        },
        logprobs: wire.top_logprobs.map(top_logprobs).transpose()?,
        choice: wire.choice,
        sampler_state,
        deadline: deadline(wire.deadline_ms, now),
        priority: wire.priority,
        tenant: wire.tenant,
        scope: prefix::Scope { salt: wire.cache_salt.into_bytes(), extra: Vec::new() },
    })
}

pub(crate) fn beam_request_from_wire(
    wire: wire::SearchBeamsRequest,
    id: RequestId,
    now: Duration,
) -> Result<BeamRequest, RequestFieldError> {
    let wire::SearchBeamsRequest { generation, beam_width, choices, length_penalty, early_stopping } = wire;
    let generation = generation.unwrap_or_default();
    if generation.grammar.is_some() {
        return Err(RequestFieldError::BeamGrammar);
    }
    let Request { prompt, prior_output, stop, logprobs, deadline, priority, tenant, scope, .. } =
        request_from_wire(generation, id, now)?;
    if prior_output > 0 {
        return Err(RequestFieldError::BeamOutput { output_tokens: prior_output, tokens: prompt.len() });
    }
    let (width, choices) = (beam_width as usize, choices as usize);
    let params = BeamParams { width, choices, length_penalty, early_stopping };
    Ok(BeamRequest { id, prompt, params, stop, logprobs, deadline, priority, tenant, scope })
}

pub(crate) fn score_request_from_wire(
    wire: wire::ScoreRequest,
    id: RequestId,
    now: Duration,
) -> Result<ScoreRequest, RequestFieldError> {
    let kind = match wire.top_logprobs {
        None => ScoreKind::Logits,
        Some(top) => ScoreKind::Logprobs { top: top_logprobs(top)? },
    };
    Ok(ScoreRequest { id, tokens: wire.tokens, kind, deadline: deadline(wire.deadline_ms, now), priority: 0 })
}

/// `pooling` is the worker's.
pub(crate) fn embed_request_from_wire(
    wire: wire::EmbedRequest,
    pooling: Pooling,
    id: RequestId,
    now: Duration,
) -> EmbedRequest {
    EmbedRequest {
        id,
        tokens: wire.tokens,
        pooling,
        deadline: deadline(wire.deadline_ms, now),
        priority: wire.priority,
        tenant: wire.tenant,
        scope: prefix::Scope { salt: wire.cache_salt.into_bytes(), extra: Vec::new() },
    }
}

fn top_logprobs(asked: u32) -> Result<u8, RequestFieldError> {
    u8::try_from(asked).map_err(|_| RequestFieldError::TopLogprobs { asked })
}

fn deadline(deadline_ms: u64, now: Duration) -> Option<Duration> {
    (deadline_ms > 0).then(|| now.saturating_add(Duration::from_millis(deadline_ms)))
}

fn sampling(
    wire: public::Sampling,
    breakers: wire::DryBreakers,
) -> Result<SamplingParams, RequestFieldError> {
    let defaults = SamplingParams::default();
    let version = match wire.mirostat.unwrap_or(0) {
        0 => None,
        1 => Some(MirostatVersion::One),
        2 => Some(MirostatVersion::Two),
        asked => return Err(RequestFieldError::Mirostat { asked }),
    };
    let mut logit_bias: Vec<(u32, f32)> = wire.logit_bias.into_iter().collect();
    // A protobuf map has no order, and the engine's request must not depend on one.
    logit_bias.sort_by_key(|&(token, _)| token);
    let mut params = SamplingParams {
        top_k: wire.top_k.unwrap_or(defaults.top_k),
        mirostat: version.map(|version| MirostatParams {
            version,
            tau: wire.mirostat_tau.unwrap_or(MIROSTAT_TAU.default),
            eta: wire.mirostat_eta.unwrap_or(MIROSTAT_ETA.default),
        }),
        dry: wire.dry_multiplier.filter(|&multiplier| multiplier != 0.0).map(|multiplier| DryParams {
            multiplier,
            base: wire.dry_base.unwrap_or(DRY_BASE.default),
            allowed_length: wire.dry_allowed_length.unwrap_or(DEFAULT_DRY_ALLOWED_LENGTH),
            last_n: wire.dry_penalty_last_n,
            breakers: dry_breakers(breakers),
        }),
        logit_bias,
        seed: wire.seed.unwrap_or(defaults.seed),
        ..defaults
    };
    macro_rules! copy_floats {
        (floats: [$($name:ident $constant:ident),*], $($rest:tt)*) => {
            $(if let Some(value) = wire.$name {
                params.$name = value;
            })*
        };
    }
    sampling_params::with_parameter_names!(copy_floats);
    Ok(params)
}

const DEFAULT_DRY_ALLOWED_LENGTH: u32 = match sampling_params::DRY_ALLOWED_LENGTH.default {
    IntegerDefault::Value(default) => default,
    IntegerDefault::Absent(_) => panic!("DRY's allowed length has a default"),
};

fn dry_breakers(wire: wire::DryBreakers) -> DryBreakers {
    let singles = wire.tokens.into_iter().map(|token| vec![token]);
    DryBreakers::new(singles.chain(wire.sequences.into_iter().map(|sequence| sequence.ids)))
}

pub(crate) fn grammar_source(wire: public::Grammar) -> Result<GrammarSource, RequestFieldError> {
    let lenient = wire.lenient;
    Ok(match wire.kind.ok_or(RequestFieldError::EmptyGrammar)? {
        Kind::JsonSchema(schema) => GrammarSource::JsonSchema { schema, lenient },
        Kind::JsonObject(public::JsonObject {}) => {
            GrammarSource::JsonSchema { schema: r#"{"type": "object"}"#.to_owned(), lenient }
        }
        Kind::Regex(regex) => GrammarSource::Regex(regex),
        Kind::Lark(lark) => GrammarSource::Lark(lark),
        Kind::Gbnf(gbnf) => GrammarSource::Gbnf(gbnf),
        Kind::Choice(choice) => GrammarSource::Choice(choice.values),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id() -> RequestId {
        RequestId(1)
    }

    #[test]
    fn tokens_after_the_prompt_are_prior_output() {
        let wire = wire::GenerateRequest { tokens: vec![1, 2, 3, 4], prompt_tokens: 3, ..Default::default() };
        assert_eq!(request_from_wire(wire.clone(), id(), Duration::ZERO).unwrap().prior_output, 1);
        let wrong = wire::GenerateRequest { prompt_tokens: 5, ..wire };
        assert_eq!(
            request_from_wire(wrong, id(), Duration::ZERO),
            Err(RequestFieldError::PromptTokens { prompt_tokens: 5, tokens: 4 })
        );
    }

    #[test]
    fn values_that_the_engine_cannot_represent_are_refused() {
        let wire = wire::GenerateRequest { tokens: vec![1], prompt_tokens: 1, ..Default::default() };
        let top = wire::GenerateRequest { top_logprobs: Some(256), ..wire.clone() };
        assert_eq!(
            request_from_wire(top, id(), Duration::ZERO),
            Err(RequestFieldError::TopLogprobs { asked: 256 })
        );
        let state = wire::GenerateRequest { sampler_state: vec![0; 33].into(), ..wire };
        assert_eq!(
            request_from_wire(state, id(), Duration::ZERO),
            Err(RequestFieldError::SamplerState { bytes: 33 })
        );
    }

    #[test]
    fn a_beam_search_has_neither_grammar_nor_output() {
        let generation = wire::GenerateRequest { tokens: vec![1, 2], prompt_tokens: 2, ..Default::default() };
        let search = |generation| wire::SearchBeamsRequest {
            generation: Some(generation),
            beam_width: 4,
            choices: 2,
            length_penalty: 0.5,
            early_stopping: true,
        };
        let request = beam_request_from_wire(search(generation.clone()), id(), Duration::ZERO).unwrap();
        let params = BeamParams { width: 4, choices: 2, length_penalty: 0.5, early_stopping: true };
        assert_eq!((request.prompt, request.params), (vec![1, 2], params));
        let output = wire::GenerateRequest { prompt_tokens: 1, ..generation.clone() };
        let refused = beam_request_from_wire(search(output), id(), Duration::ZERO);
        assert_eq!(refused, Err(RequestFieldError::BeamOutput { output_tokens: 1, tokens: 2 }));
        let grammar = wire::GenerateRequest { grammar: Some(public::Grammar::default()), ..generation };
        let refused = beam_request_from_wire(search(grammar), id(), Duration::ZERO);
        assert_eq!(refused, Err(RequestFieldError::BeamGrammar));
    }

    #[test]
    fn a_deadline_counts_from_now_and_0_means_none() {
        let wire = wire::GenerateRequest { tokens: vec![1], prompt_tokens: 1, ..Default::default() };
        let now = Duration::from_secs(5);
        assert_eq!(request_from_wire(wire.clone(), id(), now).unwrap().deadline, None);
        let wire = wire::GenerateRequest { deadline_ms: 20, ..wire };
        assert_eq!(request_from_wire(wire, id(), now).unwrap().deadline, Some(Duration::from_millis(5020)));
    }

    #[test]
    fn tenant_priority_and_salt_reach_the_engine() {
        let wire = wire::GenerateRequest {
            tokens: vec![1],
            prompt_tokens: 1,
            tenant: 7,
            priority: -2,
            cache_salt: "secret".to_owned(),
            ..Default::default()
        };
        let request = request_from_wire(wire, id(), Duration::ZERO).unwrap();
        assert_eq!((request.tenant, request.priority, &request.scope.salt[..]), (7, -2, &b"secret"[..]));
    }
}
