//! Sampling parameters of one request, and what is refused in them.

/// Defaults draw from the model's own distribution. The order in which they act is in `sampler`.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 takes the token of the highest logit after bias and penalties, the lowest id among equals.
    pub temperature: f32,
    /// Keep the k most probable tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the fewest most probable tokens that together reach this probability.
    pub top_p: f32,
    /// Keep tokens of at least this share of the highest probability.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or output; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted from logits of tokens in the output.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit for each time it is in the output.
    pub frequency_penalty: f32,
    /// Added to logits before everything else; each token at most once.
    pub logit_bias: Vec<(u32, f32)>,
    /// Equal seeds give equal output. Whoever takes the client's request draws one if it gave none.
    pub seed: u64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

impl SamplingParams {
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Ranges are those of the OpenAI API where it has the parameter.
    pub fn check(&self, vocab_size: usize) -> Result<(), ParamError> {
        range("temperature", self.temperature, 0.0, 2.0)?;
        range("min_p", self.min_p, 0.0, 1.0)?;
        range("presence_penalty", self.presence_penalty, -2.0, 2.0)?;
        range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)?;
        above_zero("top_p", self.top_p, 1.0)?;
        above_zero("repetition_penalty", self.repetition_penalty, 2.0)?;
        if self.logit_bias.len() > LOGIT_BIAS_MAX {
            return Err(ParamError::TooMany {
                field: "logit_bias",
                count: self.logit_bias.len(),
                max: LOGIT_BIAS_MAX,
            });
        }
        for (index, &(token, bias)) in self.logit_bias.iter().enumerate() {
            if token as usize >= vocab_size {
                return Err(ParamError::TokenId { field: "logit_bias", token, vocab_size });
            }
            if self.logit_bias[..index].iter().any(|&(earlier, _)| earlier == token) {
                return Err(ParamError::TokenTwice { field: "logit_bias", token });
            }
            range("logit_bias", bias, -100.0, 100.0)?;
        }
        Ok(())
    }
}

/// Entries; the OpenAI API takes 300. Bounds the work per token.
pub(crate) const LOGIT_BIAS_MAX: usize = 1024;

/// A parameter that is not a number in its range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ParamError {
    #[error("{field} is {value}, allowed are {min} to {max}")]
    Range { field: &'static str, value: f32, min: f32, max: f32 },
    #[error("{field} is {value}, allowed is above 0 and up to {max}")]
    AboveZero { field: &'static str, value: f32, max: f32 },
    #[error("{field} has {count} entries, at most {max} are allowed")]
    TooMany { field: &'static str, count: usize, max: usize },
    #[error("{field} names token {token}, the vocabulary has {vocab_size}")]
    TokenId { field: &'static str, token: u32, vocab_size: usize },
    #[error("{field} names token {token} twice")]
    TokenTwice { field: &'static str, token: u32 },
}

/// NaN is in no range.
fn range(field: &'static str, value: f32, min: f32, max: f32) -> Result<(), ParamError> {
    if (min..=max).contains(&value) { Ok(()) } else { Err(ParamError::Range { field, value, min, max }) }
}

fn above_zero(field: &'static str, value: f32, max: f32) -> Result<(), ParamError> {
    if value > 0.0 && value <= max { Ok(()) } else { Err(ParamError::AboveZero { field, value, max }) }
}
