//! Configuration of one worker process.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use service::Bytes;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Config {
    /// As logs, metrics and the supervisor call it, for example "worker-0".
    pub name: String,
    /// As the weight-server calls it.
    pub model: String,
    /// Where weights are handed over.
    pub weights_socket: PathBuf,
    /// The socket to serve on; the router looks for `worker-<N>.sock` in the runtime directory.
    pub listen: PathBuf,
    #[serde(default)]
    pub device: Device,
    /// What the KV cache may take. Reserved at the weight-server, used as sequences grow.
    pub kv_bytes: Bytes,
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
    /// How long streams may go on after the request to stop. What is cut then is resumed by the router elsewhere.
    #[serde(default = "drain", with = "service::duration")]
    pub drain: Duration,
}

/// Where the weights lie and the model computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Device {
    #[default]
    Host,
}

impl Config {
    /// Defaults for everything but the places and the budget.
    pub fn new(
        name: String,
        model: String,
        weights_socket: PathBuf,
        listen: PathBuf,
        kv_bytes: Bytes,
        threads: usize,
    ) -> Self {
        Self {
            name,
            model,
            weights_socket,
            listen,
            device: Device::default(),
            kv_bytes,
            threads,
            context_tokens: None,
            step_tokens: step_tokens(),
            running_max: running_max(),
            queue_max: queue_max(),
            drain: drain(),
        }
    }
}

fn step_tokens() -> usize {
    512
}

fn running_max() -> usize {
    64
}

fn queue_max() -> usize {
    256
}

/// Less than a supervisor's patience with a stopping worker.
fn drain() -> Duration {
    Duration::from_secs(8)
}
