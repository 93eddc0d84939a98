// SPDX-License-Identifier: Apache-2.0

//! `ballast swap`: replaces the file of a model while it serves.

use std::path::PathBuf;

use proto::fleet::v1 as wire;
use service::Exit;

use crate::chat_templates::{UnusableTemplate, read_chat_templates};
use crate::cli_error::{CliError, CliResult};
use crate::fleet_commands::{DrainTimeout, FleetSelector, call_supervisor, load_request};
use crate::fleet_config::devices_for;
use crate::model_config::FleetModelConfig;
use crate::running_fleet::block_on;
use crate::sized_model::SizedModel;
use crate::terminal::print_stdout;

#[derive(clap::Args)]
pub(crate) struct SwapArguments {
    /// The model's name, as `ballast ps` shows it
    name: String,
    /// The model file that replaces the present one. The model keeps its settings
    #[arg(value_name = "MODEL.gguf")]
    file: PathBuf,
    #[command(flatten)]
    drain: DrainTimeout,
    #[command(flatten)]
    fleet: FleetSelector,
}

/// Returns after the old file has left the memory, or the new one if the swap failed.
pub(crate) fn swap(arguments: SwapArguments) -> CliResult {
    let SwapArguments { name, file, drain, fleet } = arguments;
    let sized = sized(&fleet, &name, &file)?;
    let request = wire::SwapModelRequest {
        model: Some(load_request(sized.plan()?)),
        drain_ms: Some(drain.milliseconds()),
    };
    let mut configured = String::new();
    call_supervisor(&fleet, &format!("cannot swap {name}"), async |client| {
        configured = client.swap_model(request).await?.into_inner().configured_path;
        Ok(())
    })?;
    let mut text = format!("{name} serves {}\n", file.display());
    if !configured.is_empty() {
        text += &format!(
            "the configuration still names {configured}: change it, or the next start of the fleet loads that file\n"
        );
    }
    print_stdout(&text)
}

/// The model with its settings, and with the sizes of the new file.
fn sized(fleet: &FleetSelector, name: &str, file: &std::path::Path) -> CliResult<SizedModel> {
    let mut models = Vec::new();
    call_supervisor(fleet, "cannot ask for the models", async |client| {
        let status = client.get_status(wire::GetStatusRequest { memory: false, ledger: false }).await?;
        models = status.into_inner().models;
        Ok(())
    })?;
    let settings = |model: &wire::Model| {
        let parsed = toml::from_str::<FleetModelConfig>(&model.settings);
        parsed.map_err(|error| {
            let text = format!("the settings of model {:?} cannot be read: {}", model.name, error.message());
            CliError::new(Exit::Internal, text)
        })
    };
    let named = |name: &str| models.iter().find(|model| model.name == name);
    let Some(model) = named(name) else {
        let text = format!("no model is called {name:?}; `ballast ps` lists them");
        return Err(CliError::new(Exit::Usage, text));
    };
    let total = |model: &wire::Model| {
        let copies = u32::try_from(model.copies.len()).unwrap_or(u32::MAX).max(1);
        Ok(settings(model)?.workers.saturating_mul(copies))
    };
    let others = models.iter().filter(|other| other.name != model.name);
    let others = others.map(total).sum::<CliResult<u32>>()?;
    let mut configs = vec![FleetModelConfig { path: file.to_owned(), ..settings(model)? }];
    if let Some(draft) = configs[0].draft.as_deref().and_then(named) {
        // It has no workers of its own here: they count with the other models.
        configs.push(FleetModelConfig { workers: 0, ..settings(draft)? });
    }
    let mut seen = devices_for(configs.iter().map(|config| &config.device))?;
    if configs[0].device.is_open() {
        // The choice was made when the model was loaded.
        seen.gpus.retain(|gpu| model.copies.iter().any(|copy| copy.device == gpu.uuid));
    }
    let mut sized = SizedModel::all(&configs, others, &seen)?;
    block_on(read_chat_templates(&mut sized, &[], UnusableTemplate::Refuse))?;
    Ok(sized.swap_remove(0))
}
