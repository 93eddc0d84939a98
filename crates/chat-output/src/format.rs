// SPDX-License-Identifier: Apache-2.0

//! The formats in which models write calls and reasoning, and which one a template belongs to.

/// How a model writes tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ToolFormat {
    /// `<tool_call>{"name": .., "arguments": {..}}</tool_call>`, or a list in the same marker:
    /// Qwen 2.5 and 3, Hermes, Granite 3.1.
    Hermes,
    /// As Hermes; a call without its end marker is text.
    Granite4,
    /// `<tool_call><function=f><parameter=k>v</parameter></function></tool_call>`.
    QwenXml,
    /// `{"name": .., "parameters": {..}}`, also after `<|python_tag|>`.
    Llama3,
    /// `[f(k='v')]`.
    Pythonic,
    /// `<|python_start|>[f(k='v')]<|python_end|>`.
    Llama4,
    /// `<function_calls>f(k='v')</function_calls>`.
    Olmo3,
    /// `[TOOL_CALLS]` and a list, or `[TOOL_CALLS]f[ARGS]{..}`.
    Mistral,
    /// DeepSeek V3, R1 and V3.1.
    DeepSeek,
    /// gpt-oss.
    Harmony,
    /// `<|tool_call>call:f{k:<|"|>v<|"|>}<tool_call|>`.
    Gemma4,
    /// `<start_function_call>call:f{k:<escape>v<escape>}<end_function_call>`.
    FunctionGemma,
    /// `<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>`.
    Glm,
    KimiK2,
    /// `<minimax:tool_call><invoke name="f"><parameter name="k">v</parameter></invoke>..`.
    MiniMax,
    /// `<|tool_call|>[{..}]`.
    Granite3,
    /// `functools[{..}]`.
    Phi4Mini,
    /// `<|START_ACTION|>[{"tool_name": .., "parameters": {..}}]<|END_ACTION|>`.
    Command,
    /// The whole answer is JSON: for templates without a format of their own.
    Generic,
}

const NAMES: [(&str, ToolFormat); 19] = [
    ("hermes", ToolFormat::Hermes),
    ("granite4", ToolFormat::Granite4),
    ("qwen-xml", ToolFormat::QwenXml),
    ("llama3", ToolFormat::Llama3),
    ("pythonic", ToolFormat::Pythonic),
    ("llama4", ToolFormat::Llama4),
    ("olmo3", ToolFormat::Olmo3),
    ("mistral", ToolFormat::Mistral),
    ("deepseek", ToolFormat::DeepSeek),
    ("harmony", ToolFormat::Harmony),
    ("gemma4", ToolFormat::Gemma4),
    ("functiongemma", ToolFormat::FunctionGemma),
    ("glm", ToolFormat::Glm),
    ("kimi-k2", ToolFormat::KimiK2),
    ("minimax", ToolFormat::MiniMax),
    ("granite3", ToolFormat::Granite3),
    ("phi4-mini", ToolFormat::Phi4Mini),
    ("command", ToolFormat::Command),
    ("generic", ToolFormat::Generic),
];

/// Texts of a template that only one format has, the most particular first.
const SIGNS: [(&str, ToolFormat); 22] = [
    ("<|channel|>", ToolFormat::Harmony),
    ("<|tool_call>", ToolFormat::Gemma4),
    ("<start_function_call>", ToolFormat::FunctionGemma),
    ("[TOOL_CALLS]", ToolFormat::Mistral),
    ("<｜tool▁calls▁begin｜>", ToolFormat::DeepSeek),
    ("<|tool_calls_section_begin|>", ToolFormat::KimiK2),
    ("<minimax:tool_call>", ToolFormat::MiniMax),
    ("<arg_key>", ToolFormat::Glm),
    ("<function=", ToolFormat::QwenXml),
    ("<function_calls>", ToolFormat::Olmo3),
    ("<|START_ACTION|>", ToolFormat::Command),
    ("functools", ToolFormat::Phi4Mini),
    ("<|tool|>", ToolFormat::Phi4Mini),
    ("<|tool_call|>", ToolFormat::Granite3),
    ("<|start_of_role|>", ToolFormat::Granite4),
    ("<tool_call>", ToolFormat::Hermes),
    ("<|python_start|>", ToolFormat::Llama4),
    ("[func_name1(params_name1=", ToolFormat::Pythonic),
    ("<|python_tag|>", ToolFormat::Llama3),
    ("<|header_start|>", ToolFormat::Llama4),
    ("<|start_header_id|>", ToolFormat::Llama3),
    ("[INST]", ToolFormat::Mistral),
];

impl ToolFormat {
    /// The format of a chat template's model.
    pub fn of_template(template: &str) -> Self {
        let sign = SIGNS.iter().find(|(sign, _)| template.contains(sign));
        sign.map_or(Self::Generic, |&(_, format)| format)
    }

    pub fn from_name(name: &str) -> Option<Self> {
        NAMES.iter().find(|(known, _)| *known == name).map(|&(_, format)| format)
    }

    pub fn name(self) -> &'static str {
        NAMES.iter().find(|(_, format)| *format == self).map_or("", |&(name, _)| name)
    }

    pub fn names() -> impl Iterator<Item = &'static str> {
        NAMES.iter().map(|&(name, _)| name)
    }

    /// The texts that begin a call. Formats without one have calls at the start of the content
    /// only.
    pub fn triggers(self) -> &'static [&'static str] {
        match self {
            Self::Hermes | Self::Granite4 | Self::Glm => &["<tool_call>"],
            Self::QwenXml => &["<tool_call>", "<function="],
            Self::Llama3 => &["<|python_tag|>"],
            Self::Llama4 => &["<|python_start|>"],
            Self::Olmo3 => &["<function_calls>"],
            Self::Mistral => &["[TOOL_CALLS]"],
            Self::DeepSeek => &["<｜tool▁calls▁begin｜>"],
            Self::Gemma4 => &["<|tool_call>"],
            Self::FunctionGemma => &["<start_function_call>"],
            Self::KimiK2 => &["<|tool_calls_section_begin|>"],
            Self::MiniMax => &["<minimax:tool_call>"],
            Self::Granite3 => &["<|tool_call|>", "<tool_call>"],
            Self::Phi4Mini => &["functools[", "<|tool_call|>["],
            Self::Command => &["<|START_ACTION|>"],
            Self::Harmony | Self::Pythonic | Self::Generic => &[],
        }
    }

    /// Control tokens that the parser needs to see in the text.
    pub fn markers(self) -> &'static [&'static str] {
        match self {
            Self::DeepSeek => &[
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁call▁begin｜>",
                "<｜tool▁sep｜>",
                "<｜tool▁call▁end｜>",
                "<｜tool▁calls▁end｜>",
            ],
            Self::KimiK2 => &[
                "<|tool_calls_section_begin|>",
                "<|tool_call_begin|>",
                "<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
                "<|tool_calls_section_end|>",
            ],
            Self::Harmony => &[
                "<|start|>",
                "<|channel|>",
                "<|message|>",
                "<|constrain|>",
                "<|end|>",
                "<|call|>",
                "<|return|>",
            ],
            Self::Mistral => &["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
            Self::Hermes | Self::Granite4 => &["<tool_call>", "</tool_call>"],
            Self::QwenXml => &["<tool_call>", "</tool_call>", "<function=", "</function>"],
            Self::Glm => {
                &["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
            }
            Self::Llama4 => &["<|python_start|>", "<|python_end|>"],
            Self::Gemma4 => &["<|tool_call>", "<tool_call|>", "<|\"|>"],
            Self::FunctionGemma => &["<start_function_call>", "<end_function_call>", "<escape>"],
            Self::MiniMax => &["<minimax:tool_call>", "</minimax:tool_call>"],
            Self::Phi4Mini => &["<|tool_call|>", "<|/tool_call|>"],
            Self::Command => {
                &["<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"]
            }
            _ => self.triggers(),
        }
    }

    /// Markers around content. They are no part of it.
    pub(crate) fn frames_of_content(self) -> &'static [&'static str] {
        match self {
            Self::Command => &["<|START_RESPONSE|>", "<|END_RESPONSE|>"],
            Self::DeepSeek => &["<｜end▁of▁sentence｜>"],
            _ => &[],
        }
    }

    /// Whether the start of a call ends reasoning that the model has not closed.
    pub(crate) fn call_ends_reasoning(self) -> bool {
        matches!(self, Self::Hermes | Self::QwenXml | Self::Gemma4 | Self::Glm | Self::MiniMax | Self::KimiK2)
    }
}

/// The texts around reasoning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReasoningMarkers {
    pub open: String,
    pub close: String,
}

/// The most particular first.
const REASONING: [(&str, &str, &str); 6] = [
    ("[/THINK]", "[THINK]", "[/THINK]"),
    ("<|END_THINKING|>", "<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<|channel>thought\n", "<channel|>"),
    ("</seed:think>", "<seed:think>", "</seed:think>"),
    ("<|channel|>", "<|channel|>analysis<|message|>", "<|end|>"),
    ("</think>", "<think>", "</think>"),
];

impl ReasoningMarkers {
    /// The markers of a chat template's model, if it reasons.
    pub fn of_template(template: &str) -> Option<Self> {
        let (_, open, close) = REASONING.iter().find(|(sign, ..)| template.contains(sign))?;
        Some(Self { open: (*open).to_owned(), close: (*close).to_owned() })
    }

    /// Whether a rendered prompt ends inside reasoning.
    pub fn are_open_at_the_end_of(&self, prompt: &str) -> bool {
        prompt.trim_end().ends_with(self.open.trim_end())
    }

    /// DeepSeek R1's first template cuts reasoning off and never opens it: the model always begins
    /// with it.
    pub fn are_never_opened_by(&self, template: &str) -> bool {
        template.contains("｜Assistant｜") && template.contains(&self.close) && !template.contains(&self.open)
    }
}
