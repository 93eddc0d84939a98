// SPDX-License-Identifier: Apache-2.0

//! The process: threads that ask NVML, and the task that reports.

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cuda::DeviceUuid;
use cuda::nvml::{Nvml, NvmlError};
use proto::fleet::v1::ReportDevicesRequest;
use proto::fleet::v1::fleet_client::FleetClient;
use serde::{Deserialize, Serialize};
use service::exit::{Exit, HasExit, exit_for_io_error, one_line};
use service::grpc::ConnectError;
use service::listen::ListenError;
use service::notify::NotifyError;
use service::process_limits::StartError;
use service::{Notify, Shutdown};

use crate::monitored_devices::{MonitoredDevices, REPORT_PERIOD};

/// The subcommand of the executable, and the name of the process.
const ROLE: &str = "device-monitor";

/// How long the supervisor may take to answer a report.
const ANSWER_WAIT: Duration = Duration::from_secs(1);
/// A wait for faults ends this often, so that NVML is not asked in one endless call.
const FAULT_WAIT: Duration = Duration::from_secs(5);
/// The pause after a wait for faults that failed.
const FAULT_PAUSE: Duration = Duration::from_secs(5);

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct MonitorConfig {
    pub supervisor_socket: PathBuf,
    /// UUIDs of GPUs.
    pub devices: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum MonitorError {
    #[error("{name:?} in `devices` is not the UUID of a GPU")]
    Device { name: String },
    #[error("cannot start the async runtime of the device monitor")]
    Runtime(#[source] io::Error),
    #[error("cannot listen for signals")]
    Signals(#[source] io::Error),
    #[error("cannot start a thread of the device monitor")]
    Thread(#[source] StartError),
    #[error(transparent)]
    Notify(#[from] NotifyError),
    #[error(transparent)]
    Inherit(#[from] ListenError),
    #[error(transparent)]
    Connect(#[from] ConnectError),
}

impl HasExit for MonitorError {
    fn exit(&self) -> Exit {
        match self {
            MonitorError::Device { .. } => Exit::Usage,
            MonitorError::Runtime(source) | MonitorError::Signals(source) => exit_for_io_error(source),
            MonitorError::Thread(error) => error.exit(),
            MonitorError::Notify(error) => error.exit(),
            MonitorError::Inherit(error) => error.exit(),
            MonitorError::Connect(error) => error.exit(),
        }
    }
}

/// Reports until the fleet stops. Without NVML there is nothing to report, and the process waits.
pub fn run(config: MonitorConfig) -> Result<(), MonitorError> {
    service::logging::init(ROLE, tracing::Level::INFO);
    let uuids = config
        .devices
        .iter()
        .map(|name| DeviceUuid::parse(name).ok_or_else(|| MonitorError::Device { name: name.clone() }));
    let uuids = uuids.collect::<Result<Vec<DeviceUuid>, _>>()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(MonitorError::Runtime)?;
    runtime.block_on(async {
        let shutdown = Shutdown::install().map_err(MonitorError::Signals)?;
        let notify = Notify::from_env()?;
        let _supervisor = service::supervision::watch_supervisor(ROLE, ROLE, None, &notify, &shutdown)?;
        let channel = service::grpc::connect_lazy(&config.supervisor_socket)?;
        let devices = SharedDevices::new(&uuids);
        match start_threads(&devices, &uuids)? {
            Ok(()) => notify.status(&format!("reports on {} GPUs", uuids.len()))?,
            Err(error) => {
                let cause = one_line(&error);
                tracing::warn!(cause, "GPUs have no figures, and their faults are not seen");
                notify.status(&format!("reports nothing: {cause}"))?;
            }
        }
        notify.ready()?;
        tokio::select! {
            () = report(FleetClient::new(channel), &devices) => {}
            () = shutdown.requested() => {}
        }
        notify.stopping()?;
        Ok(())
    })
}

#[derive(Clone)]
struct SharedDevices {
    devices: Arc<Mutex<MonitoredDevices>>,
    /// A fault is reported at once.
    has_fault: Arc<tokio::sync::Notify>,
}

impl SharedDevices {
    fn new(uuids: &[DeviceUuid]) -> Self {
        let devices = MonitoredDevices::new(uuids.iter().map(DeviceUuid::to_string));
        Self { devices: Arc::new(Mutex::new(devices)), has_fault: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, MonitoredDevices> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Starts the threads, unless NVML is missing. They end with the process: a call of NVML may never
/// return.
fn start_threads(
    devices: &SharedDevices,
    uuids: &[DeviceUuid],
) -> Result<Result<(), NvmlError>, MonitorError> {
    let nvml = match Nvml::open() {
        Ok(nvml) => Arc::new(nvml),
        Err(error) => return Ok(Err(error)),
    };
    let spawn = |name: String, run: Box<dyn FnOnce() + Send>| {
        let started = std::thread::Builder::new().name(name).spawn(run);
        started.map(drop).map_err(|error| MonitorError::Thread(StartError(error)))
    };
    for (index, &uuid) in uuids.iter().enumerate() {
        let (nvml, devices) = (nvml.clone(), devices.clone());
        spawn(format!("figures-{index}"), Box::new(move || read_figures(&nvml, &devices, index, uuid)))?;
    }
    let (devices, uuids) = (devices.clone(), uuids.to_vec());
    spawn("faults".to_owned(), Box::new(move || collect_faults(&nvml, &devices, &uuids)))?;
    Ok(Ok(()))
}

fn read_figures(nvml: &Nvml, devices: &SharedDevices, index: usize, uuid: DeviceUuid) {
    let mut was_refused = false;
    loop {
        devices.lock().begin_question(index);
        match nvml.figures(uuid) {
            Ok(figures) => {
                was_refused = false;
                devices.lock().set_figures(index, figures);
            }
            Err(error) if error.is_device_lost() => devices.lock().set_problem(index, one_line(&error)),
            Err(error) => {
                devices.lock().end_question(index);
                if !std::mem::replace(&mut was_refused, true) {
                    tracing::warn!(device = %uuid, cause = one_line(&error), "cannot read the figures of a GPU");
                }
            }
        }
        std::thread::sleep(REPORT_PERIOD);
    }
}

/// Each error makes a new set of events: a GPU that is lost makes the old one invalid.
fn collect_faults(nvml: &Nvml, devices: &SharedDevices, uuids: &[DeviceUuid]) {
    let mut was_refused = false;
    loop {
        let refused = match nvml.watch_faults(uuids) {
            Err(error) => error,
            Ok(faults) => loop {
                match faults.wait(FAULT_WAIT) {
                    Ok(None) => was_refused = false,
                    Ok(Some((device, fault))) => {
                        tracing::warn!(%device, ?fault, "the driver reports a fault of a GPU");
                        devices.lock().add_fault(&device.to_string(), fault);
                        devices.has_fault.notify_one();
                    }
                    Err(error) => break error,
                }
            },
        };
        if !std::mem::replace(&mut was_refused, true) {
            tracing::warn!(cause = one_line(&refused), "cannot watch the faults of the GPUs");
        }
        std::thread::sleep(FAULT_PAUSE);
    }
}

async fn report(mut client: FleetClient<tonic::transport::Channel>, devices: &SharedDevices) {
    let mut period = tokio::time::interval(REPORT_PERIOD);
    period.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = period.tick() => devices.lock().tick(),
            () = devices.has_fault.notified() => {}
        }
        let report = devices.lock().report();
        let request = ReportDevicesRequest { devices: report.clone() };
        let answer = service::patience::timeout(ANSWER_WAIT, client.report_devices(request)).await;
        match answer {
            Ok(Ok(_)) => devices.lock().acknowledge(&report),
            Ok(Err(status)) => tracing::debug!(%status, "the supervisor did not take a report"),
            Err(_) => tracing::debug!("the supervisor did not answer a report"),
        }
    }
}
