// SPDX-License-Identifier: Apache-2.0

//! `[[models]]` in `ballast.toml`: the configuration of one model of a fleet.

use std::path::PathBuf;
use std::time::Duration;

use ops::KvTypes;
use sampling_params::SamplingDefaults;
use serde::{Deserialize, Serialize};
use service::{ByteSize, Exit};
use toml::Table;
use worker::PoolingSetting;

use crate::cli_error::{CliError, CliResult};
use crate::device_selection::DeviceSelection;

/// Two workers show the purpose of a fleet: they share one copy of the weights, and a stream
/// survives the death of its worker.
pub(crate) const DEFAULT_WORKERS: u32 = 2;
/// A shorter limit would end healthy workers of a busy machine.
const STEP_TIMEOUT_MIN: Duration = Duration::from_secs(1);
/// Workers report every 2 s that requests use them, and a model takes seconds to come back.
const IDLE_UNLOAD_MIN: Duration = Duration::from_secs(10);

/// One model of a fleet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct FleetModelConfig {
    /// Name of the model in requests.
    pub(crate) name: String,
    /// Further names of the model in requests.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) aliases: Vec<String>,
    pub(crate) path: PathBuf,
    /// The path that the configuration names, if a swap has replaced it.
    #[serde(skip)]
    pub(crate) configured_path: Option<PathBuf>,
    /// The chat template that replaces the model's own.
    pub(crate) chat_template: Option<PathBuf>,
    /// How hidden states become embeddings: none, mean or last. If absent, as the file says.
    pub(crate) pooling: Option<PoolingSetting>,
    /// Values for sampling parameters that a request leaves out.
    #[serde(default, skip_serializing_if = "SamplingDefaults::is_empty")]
    pub(crate) sampling: SamplingDefaults,
    /// Where the copies of its weights are: auto, host, host:N for a NUMA node, cuda:N, a GPU's
    /// UUID, all for every GPU, or a list.
    #[serde(default)]
    pub(crate) device: DeviceSelection,
    /// Of each copy.
    #[serde(default = "default_workers")]
    pub(crate) workers: u32,
    /// Threads of each worker. If absent, cores / workers of the fleet.
    pub(crate) threads: Option<u32>,
    pub(crate) ctx_size: Option<u32>,
    pub(crate) kv_bytes: Option<ByteSize>,
    pub(crate) kv_tokens: Option<u32>,
    /// "q8_0", or "q8_0,0-1=f16" with another type for some layers.
    #[serde(default, with = "worker::kv_types")]
    pub(crate) kv_type: KvTypes,
    pub(crate) step_tokens: Option<u32>,
    /// Sequences that a worker runs at once. If absent, the engine's default, and at most
    /// `step_tokens`.
    pub(crate) running_max: Option<u32>,
    /// Requests that may wait at a worker. Further requests are refused.
    pub(crate) queue_max: Option<u32>,
    /// Source of draft tokens: "lookup", or the name of a smaller model of this fleet with the same
    /// vocabulary.
    pub(crate) draft: Option<String>,
    /// Most draft tokens per step.
    pub(crate) draft_depth: Option<u32>,
    /// The longest time that one step may take. If absent, the worker's default for its device.
    #[serde(default, with = "service::duration::optional", skip_serializing_if = "Option::is_none")]
    pub(crate) step_timeout: Option<Duration>,
    /// The model becomes idle when no request has used it for this long. If absent, never.
    #[serde(default, with = "service::duration::optional", skip_serializing_if = "Option::is_none")]
    pub(crate) idle_unload: Option<Duration>,
    /// The first request loads the model, not the start of the fleet.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) on_demand: bool,
    /// The models directory has its file, and no entry of the configuration names it.
    #[serde(skip)]
    pub(crate) is_from_directory: bool,
    #[serde(default = "packed")]
    pub(crate) pack: bool,
}

fn default_workers() -> u32 {
    DEFAULT_WORKERS
}

fn packed() -> bool {
    true
}

impl FleetModelConfig {
    /// A model with the default settings.
    pub(crate) fn new(name: String, path: PathBuf) -> Self {
        Self {
            name,
            aliases: Vec::new(),
            path,
            configured_path: None,
            chat_template: None,
            pooling: None,
            sampling: SamplingDefaults::default(),
            device: DeviceSelection::default(),
            workers: DEFAULT_WORKERS,
            threads: None,
            ctx_size: None,
            kv_bytes: None,
            kv_tokens: None,
            kv_type: KvTypes::default(),
            step_tokens: None,
            running_max: None,
            queue_max: None,
            draft: None,
            draft_depth: None,
            step_timeout: None,
            idle_unload: None,
            on_demand: false,
            is_from_directory: false,
            pack: true,
        }
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        let Self { name, step_timeout, .. } = self;
        if let Some(timeout) = step_timeout.filter(|timeout| *timeout < STEP_TIMEOUT_MIN) {
            return Err(format!(
                "`step-timeout` of {name:?} is {timeout:?}, it must be at least {STEP_TIMEOUT_MIN:?}"
            ));
        }
        let idle_unload = self.idle_unload.map_or(Ok(()), check_idle_unload);
        idle_unload.map_err(|why| format!("`idle-unload` of {name:?}: {why}"))?;
        if self.running_max == Some(0) {
            return Err(format!("`running-max` of {name:?} is 0, it must be at least 1"));
        }
        if let Some(tokens) = self.step_tokens {
            self.check_running_max(tokens as usize)?;
        }
        if self.queue_max == Some(0) {
            return Err(format!("`queue-max` of {name:?} is 0, it must be at least 1"));
        }
        Ok(())
    }

    /// Checks that a step of `step_tokens` tokens has a row for every running sequence.
    pub(crate) fn check_running_max(&self, step_tokens: usize) -> Result<(), String> {
        match self.running_max {
            Some(sequences) if sequences as usize > step_tokens => Err(format!(
                "`running-max` of {:?} is {sequences}, it must be 1 to {step_tokens}, the tokens of a step \
                 (`step-tokens`)",
                self.name
            )),
            _ => Ok(()),
        }
    }
}

pub(crate) fn check_idle_unload(limit: Duration) -> Result<(), String> {
    match limit < IDLE_UNLOAD_MIN {
        false => Ok(()),
        true => Err(format!(
            "{} is too short, it must be at least {}",
            service::duration::format(limit),
            service::duration::format(IDLE_UNLOAD_MIN)
        )),
    }
}

/// The same setting as an argument.
pub(crate) fn parse_idle_unload(text: &str) -> Result<Duration, String> {
    let limit = service::duration::parse(text).map_err(|error| error.to_string())?;
    check_idle_unload(limit).map(|()| limit)
}

pub(crate) fn to_toml_table(config: &impl Serialize) -> CliResult<Table> {
    Table::try_from(config).map_err(|error| {
        CliError::new(Exit::Internal, format!("cannot encode a configuration as TOML: {error}"))
    })
}
