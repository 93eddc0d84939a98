// SPDX-License-Identifier: Apache-2.0

//! [`ChatTemplate`]: loads and renders a chat template in the environment that Hugging Face
//! templates expect.

use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind};
use serde_json::{Map, Value, json};

use super::content::{AcceptedContent, adapt_conversation};
use super::continuation::ContinuedMessage;
use super::error::{
    LoadTemplateError, MAX_INSTRUCTIONS, MAX_LOAD_INSTRUCTIONS, MAX_OUTPUT_BYTES, MAX_TEMPLATE_BYTES,
    RenderError,
};
use super::probe::probe;
use super::{functions, json};

/// Most nested macros, loops and includes in a template.
const MAX_RECURSION: usize = 200;

/// Names of the two templates that a file may contain.
const DEFAULT: &str = "chat_template";
const TOOL_USE: &str = "chat_template.tool_use";

/// The input of one rendering.
#[derive(Debug, Clone, Copy)]
pub struct ChatInput<'a> {
    /// Messages in the format of the OpenAI API.
    pub messages: &'a [Value],
    /// Tools that the model may call, in the format of the OpenAI API. Templates distinguish an
    /// empty list from none.
    pub tools: Option<&'a [Value]>,
    /// End the prompt with the header of the assistant's reply.
    pub add_generation_prompt: bool,
    /// End the prompt inside the last message, so that the model continues it. Not together with
    /// `add_generation_prompt`.
    pub continue_final_message: bool,
    /// Further template variables (`chat_template_kwargs`), such as `enable_thinking`.
    pub variables: &'a Map<String, Value>,
    /// The time that `strftime_now` returns.
    pub now_unix_seconds: i64,
}

/// The chat templates of a model. Immutable; can be shared between threads.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    has_tool_use: bool,
    accepts: AcceptedContent,
    bos: String,
    eos: String,
}

impl ChatTemplate {
    /// Loads the templates. `tool_use` is the template for conversations with tools, if the model
    /// has one. `bos` and `eos` are the texts of those tokens, or empty.
    pub fn new(
        source: &str,
        tool_use: Option<&str>,
        bos: &str,
        eos: &str,
    ) -> Result<Self, LoadTemplateError> {
        let mut environment = Environment::new();
        // This cannot fail: the delimiters are the default ones.
        if let Ok(syntax) = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build() {
            environment.set_syntax(syntax);
        }
        environment.set_fuel(Some(MAX_LOAD_INSTRUCTIONS));
        environment.set_recursion_limit(MAX_RECURSION);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", json::tojson);
        environment.add_filter("indent", functions::indent);
        environment.add_test("iterable", functions::is_iterable);
        environment.add_function("raise_exception", functions::raise_exception);
        for (name, source) in [(DEFAULT, Some(source)), (TOOL_USE, tool_use)] {
            let Some(source) = source else { continue };
            if source.len() > MAX_TEMPLATE_BYTES {
                return Err(LoadTemplateError::TooLong { name, bytes: source.len() });
            }
            environment
                .add_template_owned(name, prepare_source(source))
                .map_err(|source| LoadTemplateError::Syntax { name, source })?;
        }
        let has_tool_use = tool_use.is_some();
        let (bos, eos) = (bos.to_owned(), eos.to_owned());
        let mut template = Self { environment, has_tool_use, accepts: AcceptedContent::EVERYTHING, bos, eos };
        template.try_short_conversations()?;
        template.environment.set_fuel(Some(MAX_INSTRUCTIONS));
        Ok(template)
    }

    /// Finds out which content the template accepts, and refuses a template that exceeds a limit.
    fn try_short_conversations(&mut self) -> Result<(), LoadTemplateError> {
        let excessive = |name| move |source| LoadTemplateError::Excessive { name, source: Box::new(source) };
        self.accepts = probe(|messages| self.try_render(messages, &[], false)).map_err(excessive(DEFAULT))?;
        let conversation = short_conversation();
        for part in [&conversation[1..2], &conversation[1..], &conversation[..2], &conversation] {
            self.try_render(part, &[], true).map_err(excessive(DEFAULT))?;
            let name = if self.has_tool_use { TOOL_USE } else { DEFAULT };
            self.try_render(part, &[example_tool()], true).map_err(excessive(name))?;
        }
        Ok(())
    }

    /// The source of the template that a conversation with or without tools is rendered with.
    pub fn source(&self, with_tools: bool) -> String {
        let name = if self.has_tool_use && with_tools { TOOL_USE } else { DEFAULT };
        self.environment.get_template(name).map_or_else(|_| String::new(), |it| it.source().to_owned())
    }

    pub fn render(&self, input: &ChatInput<'_>) -> Result<String, RenderError> {
        let messages = adapt_conversation(input.messages, self.accepts)?;
        self.render_adapted(messages, input)
    }

    /// Renders `messages` as they are, in place of those of `input`.
    fn render_adapted(&self, mut messages: Vec<Value>, input: &ChatInput<'_>) -> Result<String, RenderError> {
        let continued = match input.continue_final_message {
            true if input.add_generation_prompt => return Err(RenderError::GenerationPromptAndContinuation),
            true => Some(ContinuedMessage::mark(&mut messages)?),
            false => None,
        };
        let mut variables = Map::new();
        variables.insert("messages".to_owned(), Value::Array(messages));
        variables.insert("tools".to_owned(), input.tools.map_or(Value::Null, |tools| tools.to_vec().into()));
        variables.insert("documents".to_owned(), Value::Null);
        variables.insert("add_generation_prompt".to_owned(), json!(input.add_generation_prompt));
        variables.insert("bos_token".to_owned(), json!(self.bos));
        variables.insert("eos_token".to_owned(), json!(self.eos));
        for (name, value) in input.variables {
            if variables.get(name).is_some_and(|_| name != "documents") {
                return Err(RenderError::ReservedVariable { name: name.chars().take(80).collect() });
            }
            variables.insert(name.clone(), value.clone());
        }
        let has_tools = input.tools.is_some_and(|tools| !tools.is_empty());
        let name = if self.has_tool_use && has_tools { TOOL_USE } else { DEFAULT };
        let prompt = self.run(name, variables, input.now_unix_seconds)?;
        match continued {
            Some(continued) => continued.cut(prompt),
            None => Ok(prompt),
        }
    }

    fn run(&self, name: &str, variables: Map<String, Value>, now: i64) -> Result<String, RenderError> {
        let template = |source| RenderError::Template { source };
        let strftime_now =
            minijinja::Value::from_function(move |format: &str| functions::strftime_at(now, format));
        let variables = minijinja::context! { strftime_now, ..minijinja::Value::from(minijinja::value::Serde(variables)) };
        let mut output = BoundedOutput::default();
        let rendered = self
            .environment
            .get_template(name)
            .map_err(template)?
            .render_captured_to(variables, &mut output)
            .map(drop);
        if output.full {
            return Err(RenderError::TooLong);
        }
        match rendered {
            Ok(()) => Ok(String::from_utf8_lossy(&output.bytes).into_owned()),
            Err(source) if source.kind() == ErrorKind::OutOfFuel => {
                let limit = self.environment.fuel().unwrap_or_default();
                Err(RenderError::TooMuchWork { limit, source })
            }
            Err(source) => match functions::raised(&source) {
                Some(message) => Err(RenderError::Refused { message: message.to_owned() }),
                None => Err(template(source)),
            },
        }
    }

    /// Renders a conversation that the template may refuse (`None`). A template that exceeds a
    /// limit is an error.
    fn try_render(
        &self,
        messages: &[Value],
        tools: &[Value],
        add_generation_prompt: bool,
    ) -> Result<Option<String>, RenderError> {
        let rendered = self.render(&ChatInput {
            messages,
            tools: Some(tools).filter(|tools| !tools.is_empty()),
            add_generation_prompt,
            continue_final_message: false,
            variables: &Map::new(),
            now_unix_seconds: 0,
        });
        match rendered {
            Err(error) if error.is_excessive() => Err(error),
            rendered => Ok(rendered.ok()),
        }
    }
}

/// A conversation as clients send it. Rendering parts of it at load shows whether a template stays
/// within its limits.
fn short_conversation() -> [Value; 4] {
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    [
        message("system", "Be brief."),
        message("user", "How are you?"),
        message("assistant", "Well."),
        message("user", "What is next?"),
    ]
}

fn example_tool() -> Value {
    let parameters = json!({"type": "object", "properties": {}});
    json!({"type": "function", "function": {"name": "next", "description": "x", "parameters": parameters}})
}

/// A writer that fails beyond [`MAX_OUTPUT_BYTES`].
#[derive(Default)]
struct BoundedOutput {
    bytes: Vec<u8>,
    full: bool,
}

impl io::Write for BoundedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > MAX_OUTPUT_BYTES {
            self.full = true;
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Changes the tags that minijinja does not treat as Jinja2 does.
///
/// 1. `{% generation %}`, which marks the model's own words for training and prints nothing,
///    becomes `{% if true %}`. The replacement keeps the trimming of blanks.
/// 2. `loop.last` is false for the last character of a string, since minijinja does not count them.
///    `loop.nextitem` works with every iterator.
fn prepare_source(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, after) = tag.split_at(end);
        let word = tag.trim_start_matches("{%").trim_end_matches("%}").trim_matches(['-', '+']).trim();
        match word {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(&tag.replace("loop.last", "(loop.nextitem is undefined)")),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
#[path = "rendered.rs"]
mod rendered;

const _: fn() = || {
    fn shared_between_threads<T: Send + Sync>() {}
    shared_between_threads::<ChatTemplate>();
};
