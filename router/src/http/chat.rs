// SPDX-License-Identifier: Apache-2.0

//! `POST /v1/chat/completions`: renders the messages with the model's chat template and generates
//! the reply.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use chat_output::{CallDelivery, OutputSyntax, ToolFormat};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;

use super::chat_reply::{ChatReply, ReplyFields};
use super::error::ApiError;
use super::fields::{IgnoredFields, ParsedBody, ResponseOptions, UnknownFields, parse_fields, parse_object};
use super::prompt_scores::{prompt_logprobs, score_prompts};
use super::request::{AppState, ReceivedBody, RequestMetadata, run_tokenizer};
use super::response::GenerationResponse;
use super::token_names::TokenNames;
use super::tool_grammar::{ArgumentsCheck, tool_grammar};
use super::tools::{RequestTools, TOOL_FIELDS, ToolFields};
use crate::chat_syntax::ChatSyntax;
use crate::choice::ChoiceEvent;
use crate::generate::{GenerationRequest, TokenizedPrompts};
use crate::model::{ChatPrompt, Conversation, ServedModel};
use crate::opening::RequestRefusal;
use crate::params::{RequestGrammar, RequestParams};

#[cfg(feature = "fuzzing")]
pub(super) mod fuzzing;

const FIELDS: [&str; 11] = [
    "messages",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "reasoning_effort",
    "enable_thinking",
    "include_reasoning",
    "prediction",
];

#[derive(Debug, Deserialize)]
struct ChatFields {
    messages: Vec<Map<String, Value>>,
    max_completion_tokens: Option<i64>,
    logprobs: Option<bool>,
    top_logprobs: Option<i64>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
    chat_template_kwargs: Option<Map<String, Value>>,
    reasoning_effort: Option<String>,
    /// The same as in `chat_template_kwargs`.
    enable_thinking: Option<bool>,
    include_reasoning: Option<bool>,
    /// Text that the reply is likely to repeat. It would only save time, so it is ignored.
    #[serde(rename = "prediction")]
    _prediction: Option<Map<String, Value>>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
}

/// OpenAI's values, and vLLM's.
const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

pub(crate) async fn post(
    State(app): State<AppState>,
    metadata: RequestMetadata,
    body: ReceivedBody,
) -> Result<Response, ApiError> {
    let parsed = parse_chat(parse_object(&body.bytes)?, app.unknown_fields)?;
    let options = parsed.options;
    let (with_reasoning, with_logprobs) = (parsed.with_reasoning, parsed.params.top_logprobs.is_some());
    let (id, created) = (format!("chatcmpl-{}", metadata.origin.trace.id()), metadata.created_unix_seconds);
    let (chat, ignored) = tokenize_chat(&app, parsed, &metadata, body).await?;
    let prompt_logprobs = chat.prompt_logprobs(&app, &metadata, options).await?;
    let StartedChat { request, events, syntax, tools } = chat.start(&app, metadata, options.stream).await?;
    let reply_fields = ReplyFields {
        id,
        created,
        with_reasoning,
        with_logprobs,
        with_token_ids: options.return_token_ids,
        names_tokens_by_id: options.names_tokens_by_id,
        prompt_logprobs,
    };
    let reply = ChatReply::new(reply_fields, &request, syntax, &tools);
    let response = GenerationResponse::new(&request, reply, events, options).respond().await?;
    Ok(ignored.name_in(response))
}

/// A chat as the client sent it, checked except for what depends on the model.
pub(super) struct ParsedChat {
    pub(super) model: Option<String>,
    pub(super) options: ResponseOptions,
    params: RequestParams,
    conversation: Conversation,
    tools: RequestTools,
    pub(super) with_reasoning: bool,
    ignored: IgnoredFields,
}

/// Parses the fields of a chat. Other APIs translate their requests to these fields.
pub(super) fn parse_chat(fields: Map<String, Value>, unknown: UnknownFields) -> Result<ParsedChat, ApiError> {
    let names = [&FIELDS[..], &TOOL_FIELDS].concat();
    let ParsedBody { endpoint, sampling, response, ignored } =
        parse_fields::<ChatFields>(fields, &names, unknown)?;
    let options = response.options()?;
    let params = chat_params(sampling.params()?, &endpoint)?;
    options.check_streaming(&params)?;
    check_messages(&endpoint.messages)?;
    let with_reasoning = endpoint.include_reasoning.unwrap_or(true);
    let (conversation, tools) = conversation(endpoint)?;
    Ok(ParsedChat { model: response.model, options, params, conversation, tools, with_reasoning, ignored })
}

/// Renders and tokenizes the chat.
pub(super) async fn tokenize_chat(
    app: &AppState,
    parsed: ParsedChat,
    metadata: &RequestMetadata,
    body: ReceivedBody,
) -> Result<(Chat, IgnoredFields), ApiError> {
    let ParsedChat { model, params, conversation, tools, ignored, .. } = parsed;
    let model = app.generator.registry.resolve(model.as_deref(), &metadata.models)?;
    let is_off = |name: &str| conversation.variables.get(name) == Some(&Value::Bool(false));
    let may_reason = !is_off("enable_thinking") && !is_off("thinking");
    let tokenizing_model = model.clone();
    let prompt =
        run_tokenizer(body.bytes.len(), move || tokenizing_model.text.encode_chat(&conversation)).await?;
    drop(body);
    Ok((Chat { model, prompt, params, tools, may_reason }, ignored))
}

/// A chat that is ready to be generated.
pub(super) struct Chat {
    model: Arc<ServedModel>,
    prompt: ChatPrompt,
    params: RequestParams,
    tools: RequestTools,
    /// The client has not switched reasoning off.
    may_reason: bool,
}

/// A chat whose reply is being generated.
pub(super) struct StartedChat {
    pub(super) request: GenerationRequest,
    pub(super) events: mpsc::Receiver<ChoiceEvent>,
    pub(super) syntax: OutputSyntax,
    pub(super) tools: RequestTools,
}

impl Chat {
    pub(super) fn into_prompt(self) -> (Arc<ServedModel>, Vec<u32>) {
        (self.model, self.prompt.tokens)
    }

    pub(super) fn prompt_tokens(&self) -> usize {
        self.prompt.tokens.len()
    }

    fn request(
        &self,
        grammar: Option<RequestGrammar>,
        metadata: &RequestMetadata,
    ) -> Result<GenerationRequest, ApiError> {
        let params = RequestParams { grammar, ..self.params.clone() };
        let tokens = vec![self.prompt.tokens.clone()];
        metadata.origin.keep_bytes(&tokens, &params);
        let prompts = TokenizedPrompts { param: "messages", tokens, at_text_start: true };
        Ok(GenerationRequest::new(self.model.clone(), prompts, params, metadata.origin.clone())?)
    }

    /// vLLM's `prompt_logprobs`, if the client asks for them.
    async fn prompt_logprobs(
        &self,
        app: &AppState,
        metadata: &RequestMetadata,
        options: ResponseOptions,
    ) -> Result<Option<Value>, ApiError> {
        let Some(top) = options.prompt_logprobs else { return Ok(None) };
        let request = self.request(None, metadata)?;
        let scored = score_prompts(app, &request, top).await?;
        let names = TokenNames { model: &self.model, by_id: options.names_tokens_by_id };
        let scores = scored.prompts.first();
        Ok(scores.map(|scores| prompt_logprobs(names, &self.prompt.tokens, scores, top as usize)))
    }

    /// Starts the chat. If a tool's schema cannot be enforced and need not be, starts it without.
    pub(super) async fn start(
        self,
        app: &AppState,
        metadata: RequestMetadata,
        is_streamed: bool,
    ) -> Result<StartedChat, ApiError> {
        let mut check = ArgumentsCheck::Schema;
        loop {
            let (syntax, grammar) = self.output_syntax(check)?;
            let is_of_tools = grammar.as_ref().is_some_and(|grammar| grammar.param == "tools");
            let visible = self.visible_tokens(&syntax);
            let request = self.request(grammar, &metadata)?.with_visible_tokens(visible);
            let request = request.with_streaming(is_streamed);
            match app.generator.start(&request).await {
                Err(RequestRefusal::Grammar { .. })
                    if is_of_tools && check == ArgumentsCheck::Schema && !self.tools.has_strict() =>
                {
                    check = ArgumentsCheck::AnyObject;
                }
                events => {
                    let events = events?;
                    return Ok(StartedChat { request, events, syntax, tools: self.tools });
                }
            }
        }
    }
}

impl Chat {
    /// How the output is read, and the grammar that it follows.
    fn output_syntax(
        &self,
        check: ArgumentsCheck,
    ) -> Result<(OutputSyntax, Option<RequestGrammar>), ApiError> {
        let given = self.params.grammar.clone();
        let may_call = self.tools.may_call();
        let mut output = OutputSyntax {
            calls: None,
            reasoning: None,
            starts_in_reasoning: self.prompt.starts_in_reasoning,
            delivery: CallDelivery::Complete,
            tools: self.tools.signatures(),
        };
        let (Some(syntax), Ok(tokenizer)) =
            (self.model.text.syntax(self.tools.listed.is_some()), self.model.text.tokenizer())
        else {
            return Ok((output, given));
        };
        let is_harmony = syntax.format == ToolFormat::Harmony;
        // A grammar for the whole output leaves no room for reasoning.
        output.reasoning = syntax.reasoning.clone().filter(|_| given.is_none() || may_call);
        output.calls = (may_call || is_harmony && given.is_none()).then_some(syntax.format);
        if !may_call {
            return Ok((output, given));
        }
        let answer = given.as_ref().and_then(|grammar| grammar.source.kind.as_ref());
        let may_reason = self.may_reason || self.prompt.starts_in_reasoning;
        let reasoning = syntax.reasoning.clone().filter(|_| may_reason);
        let syntax = &ChatSyntax { reasoning, ..syntax.clone() };
        let starts = self.prompt.starts_in_reasoning;
        match tool_grammar(syntax, tokenizer, &self.tools, starts, answer, check) {
            Some(grammar) => {
                output.calls = Some(grammar.format);
                output.delivery = CallDelivery::Streamed;
                Ok((output, Some(RequestGrammar::lark("tools", grammar.lark))))
            }
            None => match given {
                Some(given) => {
                    let message = format!("`{}` cannot be used together with `tools` here", given.param);
                    Err(ApiError::invalid(Some(given.param), message))
                }
                None => Ok((output, None)),
            },
        }
    }

    fn visible_tokens(&self, syntax: &OutputSyntax) -> Vec<u32> {
        let is_parsed = syntax.calls.is_some() || syntax.reasoning.is_some();
        match (self.model.text.syntax(self.tools.listed.is_some()), self.model.text.tokenizer()) {
            (Some(syntax), Ok(tokenizer)) if is_parsed => syntax.visible_tokens(tokenizer),
            _ => Vec::new(),
        }
    }
}

fn chat_params(params: RequestParams, fields: &ChatFields) -> Result<RequestParams, ApiError> {
    let top_logprobs = match (fields.logprobs.unwrap_or(false), fields.top_logprobs) {
        (true, top) => Some(top.unwrap_or(0)),
        (false, None) => None,
        (false, Some(_)) => {
            let message = "`top_logprobs` is only allowed when `logprobs` is true";
            return Err(ApiError::invalid(Some("top_logprobs"), message));
        }
    };
    let max_tokens = fields.max_completion_tokens.or(params.max_tokens);
    Ok(RequestParams { max_tokens, top_logprobs, ..params })
}

fn conversation(fields: ChatFields) -> Result<(Conversation, RequestTools), ApiError> {
    let tools = RequestTools::parse(ToolFields {
        tools: fields.tools,
        tool_choice: fields.tool_choice,
        parallel_tool_calls: fields.parallel_tool_calls,
    })?;
    let continue_final_message = fields.continue_final_message.unwrap_or(false);
    let mut variables = fields.chat_template_kwargs.unwrap_or_default();
    if let Some(is_on) = fields.enable_thinking {
        variables.entry("enable_thinking").or_insert(json!(is_on));
    }
    if let Some(effort) = fields.reasoning_effort {
        if !EFFORTS.contains(&&*effort) {
            let message = format!("`reasoning_effort` is none of {}", EFFORTS.join(", "));
            return Err(ApiError::invalid(Some("reasoning_effort"), message));
        }
        // Templates name the switch in two ways. `chat_template_kwargs` overrides it.
        for name in ["enable_thinking", "thinking"] {
            variables.entry(name).or_insert(json!(effort != "none"));
        }
        if effort != "none" {
            variables.entry("reasoning_effort").or_insert(json!(effort));
        }
    }
    let conversation = Conversation {
        messages: fields.messages.into_iter().map(Value::Object).collect(),
        tools: tools.listed.clone(),
        add_generation_prompt: fields.add_generation_prompt.unwrap_or(!continue_final_message),
        continue_final_message,
        variables,
    };
    Ok((conversation, tools))
}

fn check_messages(messages: &[Map<String, Value>]) -> Result<(), ApiError> {
    if messages.is_empty() {
        return Err(ApiError::invalid(Some("messages"), "`messages` is empty: at least one is needed"));
    }
    for (index, message) in messages.iter().enumerate() {
        let param = format!("messages[{index}].role");
        match message.get("role") {
            Some(Value::String(role)) if ROLES.contains(&role.as_str()) => {}
            Some(role) => {
                let shown: String = role.to_string().chars().take(80).collect();
                let message = format!("`{param}` is {shown}, allowed are {}", ROLES.join(", "));
                return Err(ApiError::invalid(Some(&param), message));
            }
            None => return Err(ApiError::invalid(Some(&param), format!("`{param}` is missing"))),
        }
    }
    Ok(())
}
