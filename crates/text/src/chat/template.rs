// SPDX-License-Identifier: Apache-2.0

//! [`ChatTemplate`]: loads and renders a chat template in the environment that Hugging Face
//! templates expect.

use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind};
use serde_json::{Map, Value, json};

use super::content::{AcceptedContent, adapt};
use super::error::{
    LoadTemplateError, MAX_INSTRUCTIONS, MAX_LOAD_INSTRUCTIONS, MAX_OUTPUT_BYTES, MAX_TEMPLATE_BYTES,
    RenderError,
};
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
    /// Tools that the model may call; may be empty.
    pub tools: &'a [Value],
    /// End the prompt with the header of the assistant's reply.
    pub add_generation_prompt: bool,
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
        environment.add_function("raise_exception", functions::raise_exception);
        for (name, source) in [(DEFAULT, Some(source)), (TOOL_USE, tool_use)] {
            let Some(source) = source else { continue };
            if source.len() > MAX_TEMPLATE_BYTES {
                return Err(LoadTemplateError::TooLong { name, bytes: source.len() });
            }
            environment
                .add_template_owned(name, without_generation_marks(source))
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
        self.accepts = AcceptedContent::probe(|messages| self.try_render(messages, &[], false))
            .map_err(excessive(DEFAULT))?;
        let conversation = short_conversation();
        for part in [&conversation[1..2], &conversation[1..], &conversation[..2], &conversation] {
            self.try_render(part, &[], true).map_err(excessive(DEFAULT))?;
            let name = if self.has_tool_use { TOOL_USE } else { DEFAULT };
            self.try_render(part, &[example_tool()], true).map_err(excessive(name))?;
        }
        Ok(())
    }

    pub fn render(&self, input: &ChatInput<'_>) -> Result<String, RenderError> {
        let messages =
            input.messages.iter().enumerate().map(|(index, message)| adapt(index, message, self.accepts));
        let tools = match input.tools {
            [] => Value::Null,
            tools => Value::Array(tools.to_vec()),
        };
        let mut variables = Map::new();
        variables.insert("messages".to_owned(), Value::Array(messages.collect::<Result<_, _>>()?));
        variables.insert("tools".to_owned(), tools);
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
        let name = if self.has_tool_use && !input.tools.is_empty() { TOOL_USE } else { DEFAULT };
        self.run(name, variables, input.now_unix_seconds)
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
            tools,
            add_generation_prompt,
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

/// Replaces `{% generation %}`, which marks the model's own words for training and prints nothing,
/// by `{% if true %}`. The replacement keeps the trimming of blanks.
fn without_generation_marks(source: &str) -> String {
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
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

const _: fn() = || {
    fn shared_between_threads<T: Send + Sync>() {}
    shared_between_threads::<ChatTemplate>();
};
