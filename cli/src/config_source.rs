// SPDX-License-Identifier: Apache-2.0

//! [`ConfigSource`]: the file that a fleet was configured with, for reading it again while the
//! fleet runs.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use service::RuntimeDir;
use supervisor::{ConfigReader, ReloadScope, ReloadedSpec, diff_settings, recorded_models};
use toml::Table;

use crate::chat_templates::{UnusableTemplate, read_chat_templates};
use crate::cli_error::{CliError, CliResult, IoContext};
use crate::fleet_config::FleetConfig;
use crate::fleet_models::sized_or_unusable;
use crate::model_config::to_toml_table;
use crate::models_directory::add_models;
use crate::resident_models::ResidentModels;
use crate::swapped_files::with_swapped_files;

/// Keys that only a restart of the supervisor applies: its sockets and directory, the memory of the
/// weight-server, what all processes get at their start, and the directory that it watches.
const FIXED: [&str; 8] = [
    "runtime-dir",
    "listen",
    "host-budget",
    "gpu-budget",
    "gpu",
    "supervision",
    "models-directory",
    "tracing",
];

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ConfigSource {
    path: PathBuf,
    /// The values of [`FIXED`] at the start, as the file has them.
    fixed: Table,
}

impl ConfigSource {
    /// `read` is what the file says, without overrides of the command line.
    pub(crate) fn new(path: &Path, read: &FleetConfig) -> CliResult<Self> {
        let path = std::path::absolute(path).with_context(|| format!("cannot find {}", path.display()))?;
        Ok(Self { path, fixed: fixed_settings(read)? })
    }

    /// What the supervisor calls to read the configuration again. `applied` is the present one,
    /// `listen` the address on which the router listens.
    pub(crate) fn reader(
        self,
        applied: FleetConfig,
        directory: RuntimeDir,
        listen: Option<SocketAddr>,
    ) -> ConfigReader {
        let (watched, tracing) = (applied.models_directory.clone(), applied.tracing.clone());
        let gpu_budget = applied.gpu_budget;
        let applied = Arc::new(Mutex::new(applied));
        // Read, and perhaps refused by the supervisor.
        let pending = Arc::new(Mutex::new(None));
        let (of_read, pending_of_read) = (applied.clone(), pending.clone());
        let read = move |scope| {
            let read = || {
                let (mut config, mut not_applied) = (FleetConfig::clone(&lock(&of_read)), Vec::new());
                if scope != ReloadScope::ModelsDirectory {
                    config = FleetConfig::load(&self.path, None)?;
                    not_applied = diff_settings(&self.fixed, &fixed_settings(&config)?);
                    config.models_directory.clone_from(&watched);
                    config.tracing.clone_from(&tracing);
                    config.gpu_budget = gpu_budget;
                }
                let spec = spec(&config, &directory, listen)?;
                if scope == ReloadScope::All {
                    *lock(&pending_of_read) = Some(config);
                }
                Ok(ReloadedSpec { not_applied, ..spec })
            };
            read().map_err(|failure: CliError| failure.message().to_owned())
        };
        let accept = move || {
            if let Some(config) = lock(&pending).take() {
                *lock(&applied) = config;
            }
        };
        ConfigReader { read: Arc::new(read), accept: Arc::new(accept) }
    }
}

fn lock<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads the heads of the model files, those of the models directory among them.
fn spec(config: &FleetConfig, directory: &RuntimeDir, listen: Option<SocketAddr>) -> CliResult<ReloadedSpec> {
    let mut config = config.clone();
    config.models.retain(|model| !model.is_from_directory);
    add_models(&mut config)?;
    let mut config = with_swapped_files(&config, directory);
    let resident = ResidentModels::find(&config, directory);
    // What is wrong with an entry of the configuration is an error.
    let (mut sized, unusable) = sized_or_unusable(&mut config, &resident, |model| model.is_from_directory)?;
    // A task of the supervisor that may block runs this.
    tokio::runtime::Handle::current().block_on(read_chat_templates(
        &mut sized,
        &recorded_models(directory),
        UnusableTemplate::Refuse,
    ))?;
    let choices = sized.iter().flat_map(|model| &model.copies).map(|copy| &copy.choice);
    let gpus = choices.filter_map(|choice| choice.gpu.as_ref());
    Ok(ReloadedSpec {
        router: to_toml_table(&config.router_config(directory, listen))?,
        models: config.model_specs(&sized, &resident)?,
        unusable,
        not_applied: Vec::new(),
        gpus: config.gpu_devices(gpus),
    })
}

fn fixed_settings(config: &FleetConfig) -> CliResult<Table> {
    let mut settings = to_toml_table(config)?;
    settings.retain(|key, _| FIXED.contains(&key));
    Ok(settings)
}
