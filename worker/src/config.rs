// SPDX-License-Identifier: Apache-2.0

//! Configuration of one worker process.

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use cuda::{DeviceSelector, DeviceSelectorError};
use memory::manifest::HOST_DEVICE;
use memory::numa::{device_of_node, node_of_device};
use ops::KvTypes;
use sampling_params::SamplingDefaults;
use serde::{Deserialize, Serialize};
use service::{ByteSize, UserId};
use traces::TracingConfig;

use crate::pooling::PoolingSetting;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct WorkerConfig {
    /// The name in logs, metrics and the supervisor, for example "worker-0".
    pub name: String,
    /// The name of the weights at the weight-server.
    pub model: String,
    /// The model's name in requests. Absent: `model`. Workers of several models may have one copy
    /// of the weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub served_model: Option<String>,
    /// Further names of the model in requests.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// The chat template that replaces the model's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<ChatTemplateSetting>,
    /// How hidden states become embeddings. Absent: as the model's file says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pooling: Option<PoolingSetting>,
    /// Values for sampling parameters that a request leaves out.
    #[serde(default, skip_serializing_if = "SamplingDefaults::is_empty")]
    pub sampling: SamplingDefaults,
    /// The weight-server's hand-off socket.
    pub weights_socket: PathBuf,
    /// The socket to serve on. The router looks for `worker-<N>.sock` in the runtime directory.
    pub listen: PathBuf,
    /// Users whose processes may call this worker, beside its own user: the router's, if it has
    /// another one.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub allow_users: BTreeSet<UserId>,
    #[serde(default)]
    pub device: ComputeDevice,
    /// The file through which the workers of a GPU take turns. Absent: they do not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn_file: Option<PathBuf>,
    /// The directory of MPS, which the worker waits for. Absent: the worker does not use MPS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps_directory: Option<PathBuf>,
    /// The size of the KV cache. Reserved at the weight-server, mapped as sequences grow.
    pub kv_bytes: ByteSize,
    /// The types of keys and values: "q8_0", or "q8_0,0-1=f16" with another type for some layers.
    #[serde(default, with = "crate::kv_types")]
    pub kv_type: KvTypes,
    /// Memory for activations, logits and kernel buffers, reserved with the KV cache. Absent:
    /// enough for a dense model of 8B parameters with the default steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace_bytes: Option<ByteSize>,
    /// Compute threads.
    pub threads: usize,
    /// Limits the model's context length.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context_tokens: Option<usize>,
    /// Token budget of a step: longer prompts are computed by chunked prefill. Absent: the default
    /// of the device, [`Self::step_tokens`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_tokens: Option<usize>,
    /// Sequences that run at once.
    #[serde(default = "running_max")]
    pub running_max: usize,
    /// Requests that may wait. Further requests are refused.
    #[serde(default = "queue_max")]
    pub queue_max: usize,
    /// Where draft tokens come from.
    #[serde(default, skip_serializing_if = "DraftSource::is_off")]
    pub draft: DraftSource,
    /// Draft tokens per step, at most. Fewer are drafted while many are rejected or the batch is
    /// full.
    #[serde(default = "draft_depth")]
    pub draft_depth: usize,
    /// The longest time that one step may take. A worker whose step takes longer ends and is
    /// started again. Absent: see [`WorkerConfig::step_timeout`].
    #[serde(default, with = "service::duration::optional", skip_serializing_if = "Option::is_none")]
    pub step_timeout: Option<Duration>,
    /// How long streams may continue after the request to stop. The router resumes aborted streams
    /// on other workers.
    #[serde(default = "drain", with = "service::duration")]
    pub drain: Duration,
    /// Where spans of requests go. If absent, none are recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tracing: Option<TracingConfig>,
}

/// A chat template. The worker sends its text to the router.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected the path of a file")]
pub enum ChatTemplateSetting {
    /// Not read yet.
    File(PathBuf),
    Checked(CheckedChatTemplate),
}

/// A chat template that was read and tried. Each start of a worker uses this text, whatever
/// happens to the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckedChatTemplate {
    pub file: PathBuf,
    pub text: String,
}

/// The device of weights and computation: "host", "host:N" for a NUMA node, "cuda:N", or a GPU's
/// UUID as nvidia-smi shows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ComputeDevice {
    #[default]
    Host,
    /// Memory and processors of one NUMA node.
    HostNode(u32),
    Gpu(DeviceSelector),
}

/// The source of draft tokens: "off", "lookup" (repetitions in the text itself), or the name of a
/// smaller model with the same vocabulary at the weight-server.
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
    type Err = DeviceSelectorError;

    fn from_str(text: &str) -> Result<Self, DeviceSelectorError> {
        match (text, node_of_device(text)) {
            (HOST_DEVICE, _) => Ok(Self::Host),
            (_, Some(node)) => Ok(Self::HostNode(node)),
            (_, None) => text.parse().map(Self::Gpu),
        }
    }
}

impl TryFrom<String> for ComputeDevice {
    type Error = DeviceSelectorError;

    fn try_from(text: String) -> Result<Self, DeviceSelectorError> {
        text.parse()
    }
}

impl fmt::Display for ComputeDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str(HOST_DEVICE),
            Self::HostNode(node) => f.write_str(&device_of_node(*node)),
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
    /// Defaults for everything except names, sockets, KV cache size and threads.
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
            served_model: None,
            aliases: Vec::new(),
            chat_template: None,
            pooling: None,
            sampling: SamplingDefaults::default(),
            weights_socket,
            listen,
            allow_users: BTreeSet::new(),
            device: ComputeDevice::default(),
            turn_file: None,
            mps_directory: None,
            kv_bytes,
            kv_type: KvTypes::default(),
            workspace_bytes: None,
            threads,
            context_tokens: None,
            step_tokens: None,
            running_max: running_max(),
            queue_max: queue_max(),
            draft: DraftSource::default(),
            draft_depth: draft_depth(),
            step_timeout: None,
            drain: drain(),
            tracing: None,
        }
    }

    /// The text of the chat template that replaces the model's own.
    pub(crate) fn chat_template_text(&self) -> Option<&str> {
        match &self.chat_template {
            Some(ChatTemplateSetting::Checked(template)) => Some(&template.text),
            Some(ChatTemplateSetting::File(_)) | None => None,
        }
    }

    /// The token budget of a step.
    pub fn step_tokens(&self) -> usize {
        self.step_tokens.unwrap_or(match self.device {
            ComputeDevice::Host | ComputeDevice::HostNode(_) => engine::STEP_TOKENS,
            ComputeDevice::Gpu(_) => GPU_STEP_TOKENS,
        })
    }

    /// The longest time that one step may take.
    pub fn step_timeout(&self) -> Duration {
        self.step_timeout.unwrap_or(match self.device {
            ComputeDevice::Host | ComputeDevice::HostNode(_) => HOST_STEP_TIMEOUT,
            ComputeDevice::Gpu(_) => GPU_STEP_TIMEOUT,
        })
    }

    /// The model's name in requests.
    pub fn served_model(&self) -> &str {
        self.served_model.as_deref().unwrap_or(&self.model)
    }
}

fn running_max() -> usize {
    engine::RUNNING_MAX
}

fn queue_max() -> usize {
    engine::QUEUE_MAX
}

/// With the demo models, a larger depth rarely increases the accepted tokens per step.
pub fn draft_depth() -> usize {
    8
}

/// The slowest step known, 2,048 prompt tokens of an 8B model on two cores of a busy host, takes
/// about a minute.
const HOST_STEP_TIMEOUT: Duration = Duration::from_secs(180);
/// A step of 2,048 tokens of an 8B model after 14,336 takes 0.13 s on an H200, and up to 16 workers
/// take turns.
const GPU_STEP_TIMEOUT: Duration = Duration::from_secs(10);
/// Token budget of a step on a GPU. Larger steps fill it better (decision 0006).
const GPU_STEP_TOKENS: usize = 2048;

/// Shorter than the time that the supervisor gives a stopping worker.
fn drain() -> Duration {
    Duration::from_secs(8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_reads_back_what_it_prints() {
        for text in ["host", "host:1", "cuda:3", "GPU-00112233-4455-6677-8899-aabbccddeeff"] {
            assert_eq!(text.parse::<ComputeDevice>().map(|device| device.to_string()).as_deref(), Ok(text));
        }
        let error = "cpu".parse::<ComputeDevice>().unwrap_err();
        assert!(error.to_string().contains("\"cpu\" names no GPU"), "{error}");
    }

    #[test]
    fn steps_are_larger_on_a_gpu_unless_the_configuration_has_their_size() {
        let (places, names) = (PathBuf::new, String::new);
        let mut config = WorkerConfig::new(names(), names(), places(), places(), ByteSize(0), 1);
        assert_eq!(config.step_tokens(), 512);
        config.device = "cuda:0".parse().unwrap();
        assert_eq!(config.step_tokens(), 2048);
        config.step_tokens = Some(256);
        assert_eq!(config.step_tokens(), 256);
    }
}
