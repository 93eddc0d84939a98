//! Configuration of one worker process.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use memory::cuda::{DeviceSelector, SelectorError};
use memory::manifest::HOST_DEVICE;
use ops::KvTypes;
use serde::{Deserialize, Serialize};
use service::ByteSize;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct WorkerConfig {
    /// As logs, metrics and the supervisor call it, for example "worker-0".
    pub name: String,
    /// As the weight-server calls it.
    pub model: String,
    /// Where weights are handed over.
    pub weights_socket: PathBuf,
    /// The socket to serve on; the router looks for `worker-<N>.sock` in the runtime directory.
    pub listen: PathBuf,
    #[serde(default)]
    pub device: ComputeDevice,
    /// What the KV cache may take. Reserved at the weight-server, used as sequences grow.
    pub kv_bytes: ByteSize,
    /// What keys and values are stored as: "q8_0", or "q8_0,0-1=f16" with another type for some layers.
    #[serde(default, with = "crate::kv_types")]
    pub kv_type: KvTypes,
    /// What activations, logits and the kernels' own memory may take, reserved with it. Absent: enough for small steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace_bytes: Option<ByteSize>,
    /// Threads that compute.
    pub threads: usize,
    /// Cuts the model's context length.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context_tokens: Option<usize>,
    /// Tokens of one step: prompts are computed in pieces of at most this many.
    #[serde(default = "step_tokens")]
    pub step_tokens: usize,
    /// Sequences that are computed at once.
    #[serde(default = "running_max")]
    pub running_max: usize,
    /// Requests that may wait; more are refused.
    #[serde(default = "queue_max")]
    pub queue_max: usize,
    /// Where guesses at the next tokens come from.
    #[serde(default, skip_serializing_if = "DraftSource::is_off")]
    pub draft: DraftSource,
    /// Most tokens that are guessed at once; fewer where guesses are wrong or the batch is full.
    #[serde(default = "draft_depth")]
    pub draft_depth: usize,
    /// How long streams may go on after the request to stop. What is cut then is resumed by the router elsewhere.
    #[serde(default = "drain", with = "service::duration")]
    pub drain: Duration,
}

/// Where the weights lie and the model computes: "host", "cuda:N", or a GPU's UUID as nvidia-smi shows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ComputeDevice {
    #[default]
    Host,
    Gpu(DeviceSelector),
}

/// What drafts tokens for the model: "off", "lookup" (the text itself, where it repeats), or the name of a smaller model
/// with the same vocabulary, as the weight-server calls it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum DraftSource {
    #[default]
    Off,
    Lookup,
    Model(String),
}

impl DraftSource {
    pub fn is_off(&self) -> bool {
        *self == Self::Off
    }
}

impl From<String> for DraftSource {
    fn from(text: String) -> Self {
        match text.as_str() {
            "off" => Self::Off,
            "lookup" => Self::Lookup,
            _ => Self::Model(text),
        }
    }
}

impl From<DraftSource> for String {
    fn from(draft: DraftSource) -> Self {
        match draft {
            DraftSource::Off => "off".to_owned(),
            DraftSource::Lookup => "lookup".to_owned(),
            DraftSource::Model(name) => name,
        }
    }
}

impl FromStr for ComputeDevice {
    type Err = SelectorError;

    fn from_str(text: &str) -> Result<Self, SelectorError> {
        if text == HOST_DEVICE { Ok(Self::Host) } else { text.parse().map(Self::Gpu) }
    }
}

impl TryFrom<String> for ComputeDevice {
    type Error = SelectorError;

    fn try_from(text: String) -> Result<Self, SelectorError> {
        text.parse()
    }
}

impl fmt::Display for ComputeDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str(HOST_DEVICE),
            Self::Gpu(selector) => selector.fmt(f),
        }
    }
}

impl From<ComputeDevice> for String {
    fn from(device: ComputeDevice) -> Self {
        device.to_string()
    }
}

impl WorkerConfig {
    /// Defaults for everything but the places and the budget.
    pub fn new(
        name: String,
        model: String,
        weights_socket: PathBuf,
        listen: PathBuf,
        kv_bytes: ByteSize,
        threads: usize,
    ) -> Self {
        Self {
            name,
            model,
            weights_socket,
            listen,
            device: ComputeDevice::default(),
            kv_bytes,
            kv_type: KvTypes::default(),
            workspace_bytes: None,
            threads,
            context_tokens: None,
            step_tokens: step_tokens(),
            running_max: running_max(),
            queue_max: queue_max(),
            draft: DraftSource::default(),
            draft_depth: draft_depth(),
            drain: drain(),
        }
    }
}

fn step_tokens() -> usize {
    engine::STEP_TOKENS
}

fn running_max() -> usize {
    engine::RUNNING_MAX
}

fn queue_max() -> usize {
    engine::QUEUE_MAX
}

/// Drafts of demo models are right that often that more seldom pays.
pub fn draft_depth() -> usize {
    8
}

/// Less than a supervisor's patience with a stopping worker.
fn drain() -> Duration {
    Duration::from_secs(8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_written_as_they_are_read() {
        for text in ["host", "cuda:3", "GPU-00112233-4455-6677-8899-aabbccddeeff"] {
            assert_eq!(text.parse::<ComputeDevice>().map(|device| device.to_string()).as_deref(), Ok(text));
        }
        let error = "cpu".parse::<ComputeDevice>().unwrap_err();
        assert!(error.to_string().contains("\"cpu\" names no GPU"), "{error}");
    }
}
