// SPDX-License-Identifier: Apache-2.0

//! `Embed` and `Rerank` of the public gRPC service.

use std::sync::Arc;
use std::time::Duration;

use proto::v1::{self as wire, embed_input};
use tonic::{Request, Status};

use super::{InferenceService, check_ids, earlier_deadline_ms, grpc_timeout, model_access, run_tokenizer};
use crate::embedding::{
    EMBEDDED_VALUES_MAX, EmbedError, InputName, NotPooledError, PooledPrompts, PooledUse, finish_embedding,
    truncate_input,
};
use crate::generate::{EMBEDDING_INPUTS_MAX, GenerationRequest, RequestOrigin, TokenizedPrompts};
use crate::model::{PairLimits, ServedModel};
use crate::params::{RequestParamError, RequestParams};
use crate::relevance::{PairError, PairFields, TextPairs, ranking};

/// What both messages have.
struct CallFields {
    tenant: String,
    priority: i32,
    cache_salt: String,
    deadline_ms: u64,
}

/// The model of a call, and how it is scheduled.
struct PooledCall {
    model: Arc<ServedModel>,
    params: RequestParams,
    origin: RequestOrigin,
}

pub(super) async fn embed(
    service: &InferenceService,
    request: Request<wire::EmbedRequest>,
) -> Result<wire::EmbedReply, Status> {
    let message = request.get_ref();
    let fields = CallFields {
        tenant: message.tenant.clone(),
        priority: message.priority,
        cache_salt: message.cache_salt.clone(),
        deadline_ms: message.deadline_ms,
    };
    let (call, message) =
        begin(service, request, fields, PooledUse::Embeddings, |message| &message.model).await?;
    let (count, max) = (message.inputs.len(), EMBEDDING_INPUTS_MAX);
    if count > max {
        return Err(RequestParamError::TooManyEntries { param: "inputs", count, max }.into());
    }
    let length = call.model.description.embedding_length;
    if message.dimensions.is_some_and(|asked| !(1..=length).contains(&asked)) {
        let value = message.dimensions.unwrap_or_default().to_string();
        let allowed = format!("1 to {length}");
        return Err(RequestParamError::OutOfRange { param: "dimensions", value, allowed }.into());
    }
    let values = count.saturating_mul(message.dimensions.unwrap_or(length) as usize);
    if values > EMBEDDED_VALUES_MAX {
        let text = format!("`inputs` have {values} values, allowed are {EMBEDDED_VALUES_MAX}");
        return Err(Status::invalid_argument(text));
    }
    let limit = token_limit(message.truncate_tokens, &call.model)?;
    let (inputs, tokenizing_model) = (message.inputs, call.model.clone());
    let bytes = inputs.iter().map(text_bytes).sum();
    let tokens = run_tokenizer(bytes, move || {
        inputs.into_iter().map(|input| tokenize(&tokenizing_model, input, limit)).collect()
    });
    let tokens = tokens.await?;
    let name_of = |index| InputName { field: "inputs", index: Some(index) };
    let (model, pooled) = pool(service, call, "inputs", tokens, name_of).await?;
    let finish = |values| wire::Embedding {
        values: finish_embedding(values, message.dimensions, !message.no_normalize),
    };
    Ok(wire::EmbedReply {
        model: model.name().to_owned(),
        embeddings: pooled.vectors.into_iter().map(finish).collect(),
        prompt_tokens: pooled.prompt_tokens as u32,
    })
}

pub(super) async fn rerank(
    service: &InferenceService,
    request: Request<wire::RerankRequest>,
) -> Result<wire::RerankReply, Status> {
    let message = request.get_ref();
    let fields = CallFields {
        tenant: message.tenant.clone(),
        priority: message.priority,
        cache_salt: message.cache_salt.clone(),
        deadline_ms: message.deadline_ms,
    };
    let (call, message) =
        begin(service, request, fields, PooledUse::Relevance, |message| &message.model).await?;
    let (count, max) = (message.documents.len(), EMBEDDING_INPUTS_MAX - 1);
    if count > max {
        return Err(RequestParamError::TooManyEntries { param: "documents", count, max }.into());
    }
    if count == 0 {
        return Err(RequestParamError::EmptyPrompt { param: "documents" }.into());
    }
    let fields = PairFields { query: "query", documents: "documents" };
    let pairs = TextPairs { queries: vec![message.query], documents: message.documents, fields };
    let limits =
        PairLimits { prompt: token_limit(message.truncate_tokens, &call.model)?, ..PairLimits::default() };
    let (bytes, tokenizing_model) = (pairs.prompt_bytes(&call.model)?, call.model.clone());
    let tokenized = run_tokenizer(bytes, move || {
        let most = tokenizing_model.description.context_tokens;
        Ok((pairs.tokenize(&tokenizing_model, limits, most)?, pairs))
    });
    let (tokens, pairs) = tokenized.await?;
    let pooling = call.model.description.pooling;
    let name_of = |index| pairs.name_of(pooling, index);
    let (model, pooled) = pool(service, call, "documents", tokens, name_of).await?;
    let scores = pairs.scores(pooling, &pooled.vectors);
    let top = if message.top_n == 0 { usize::MAX } else { message.top_n as usize };
    let result = |index: usize| wire::RerankResult { index: index as u32, relevance_score: scores[index] };
    Ok(wire::RerankReply {
        model: model.name().to_owned(),
        results: ranking(&scores, top).into_iter().map(result).collect(),
        prompt_tokens: pooled.prompt_tokens as u32,
    })
}

/// Resolves the model of a call and checks that it pools.
async fn begin<T>(
    service: &InferenceService,
    request: Request<T>,
    fields: CallFields,
    wanted: PooledUse,
    name: impl Fn(&T) -> &String,
) -> Result<(PooledCall, T), Status> {
    let CallFields { tenant, priority, cache_salt, deadline_ms } = fields;
    let origin = service.origin(&request, &tenant)?;
    let deadline_ms = earlier_deadline_ms(grpc_timeout(request.metadata()), deadline_ms);
    let timeout = deadline_ms.map_or(Duration::MAX, |ms| Duration::from_millis(ms.unsigned_abs()));
    let wait = (origin.tenant.clone(), service.generator.deadline_of(&origin, timeout));
    let access = model_access(&request);
    let (model, message) = service.resolve(request, name, wait).await?;
    service.generator.check_pooled(&model, wanted, &access)?;
    let params = RequestParams {
        priority: Some(i64::from(priority)),
        cache_salt: Some(cache_salt),
        deadline_ms,
        ..RequestParams::default()
    };
    Ok((PooledCall { model, params, origin }, message))
}

async fn pool(
    service: &InferenceService,
    call: PooledCall,
    param: &'static str,
    tokens: Vec<Vec<u32>>,
    name_of: impl Fn(usize) -> InputName,
) -> Result<(Arc<ServedModel>, PooledPrompts), Status> {
    let PooledCall { model, params, origin } = call;
    origin.keep_bytes(&tokens, &params);
    let prompts = TokenizedPrompts { param, tokens, at_text_start: false };
    let request = GenerationRequest::pooled(model.clone(), prompts, params, origin)?;
    let pooled = service.generator.embed(&request, name_of).await?;
    Ok((model, pooled))
}

fn text_bytes(input: &wire::EmbedInput) -> usize {
    match &input.input {
        Some(embed_input::Input::Text(text)) => text.len(),
        _ => 0,
    }
}

fn tokenize(model: &ServedModel, input: wire::EmbedInput, limit: Option<usize>) -> Result<Vec<u32>, Status> {
    let mut tokens = match input.input {
        Some(embed_input::Input::Text(text)) => model
            .text
            .encode(&text, true)
            .map_err(|error| Status::invalid_argument(format!("`inputs`: {error}")))?,
        Some(embed_input::Input::Tokens(tokens)) => check_ids(model, "inputs", &tokens.ids)?,
        None => return Err(Status::invalid_argument("an entry of `inputs` has neither text nor tokens")),
    };
    if let Some(limit) = limit {
        truncate_input(model, &mut tokens, limit);
    }
    Ok(tokens)
}

fn token_limit(asked: Option<u32>, model: &ServedModel) -> Result<Option<usize>, RequestParamError> {
    let context = model.description.context_tokens;
    let Some(asked) = asked else { return Ok(None) };
    if (1..=context).contains(&asked) {
        return Ok(Some(asked as usize));
    }
    let (value, allowed) = (asked.to_string(), format!("1 to {context}"));
    Err(RequestParamError::OutOfRange { param: "truncate_tokens", value, allowed })
}

impl From<NotPooledError> for Status {
    fn from(error: NotPooledError) -> Self {
        Status::invalid_argument(error.to_string())
    }
}

impl From<PairError> for Status {
    fn from(error: PairError) -> Self {
        Status::invalid_argument(error.to_string())
    }
}

impl From<EmbedError> for Status {
    fn from(error: EmbedError) -> Self {
        match error {
            EmbedError::Refused(refusal) => refusal.into(),
            EmbedError::KvCacheExceeded { .. } => Status::invalid_argument(error.to_string()),
        }
    }
}
