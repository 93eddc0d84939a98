// SPDX-License-Identifier: Apache-2.0

//! `ballast quarantine`: takes a device of a running fleet out of service, or returns it.

use std::path::PathBuf;

use cuda::DeviceSelector;
use proto::fleet::v1 as wire;
use service::Exit;

use crate::cli_error::{CliError, CliResult};
use crate::device_choice::DeviceOption;
use crate::devices::discover_gpus;
use crate::fleet_choice::find_fleet;
use crate::ps;
use crate::running_fleet::block_on;

#[derive(clap::Args)]
pub(crate) struct QuarantineArguments {
    /// host, host:N, cuda:N, or a UUID as `ballast ps` shows it
    device: DeviceOption,
    /// For the log and `ballast ps`
    #[arg(long, value_name = "TEXT", default_value = "by a command", conflicts_with = "end")]
    reason: String,
    /// Return the device to service
    #[arg(long)]
    end: bool,
    /// Runtime directory of the fleet [default: that of the only running fleet]
    #[arg(long, value_name = "DIR")]
    runtime_dir: Option<PathBuf>,
}

pub(crate) fn run(arguments: QuarantineArguments) -> CliResult {
    let QuarantineArguments { device, reason, end, runtime_dir } = arguments;
    let device = name_in_fleet(device)?;
    block_on(async {
        let mut client = ps::connect(&find_fleet(runtime_dir.as_deref()).await?).await?;
        let (what, outcome) = if end {
            let request = wire::EndQuarantineRequest { device: device.clone() };
            ("end the quarantine of", client.end_quarantine(request).await.map(drop))
        } else {
            let request = wire::QuarantineDeviceRequest { device: device.clone(), reason };
            ("quarantine", client.quarantine_device(request).await.map(drop))
        };
        outcome.map_err(|status| CliError::from_status(&format!("cannot {what} {device}"), &status))
    })
}

/// A fleet calls a GPU by its UUID.
fn name_in_fleet(device: DeviceOption) -> CliResult<String> {
    let ordinal = match device {
        DeviceOption::Auto => {
            return Err(CliError::new(Exit::Usage, "name one device, as `ballast ps` shows it"));
        }
        DeviceOption::Gpu(DeviceSelector::Ordinal(ordinal)) => ordinal,
        other => return Ok(other.to_string()),
    };
    let seen = discover_gpus()?;
    let gpu = seen.gpus.into_iter().find(|gpu| gpu.ordinal == ordinal);
    gpu.map(|gpu| gpu.uuid).ok_or_else(|| {
        CliError::new(Exit::Usage, format!("there is no cuda:{ordinal} here; name the UUID of the GPU"))
    })
}
