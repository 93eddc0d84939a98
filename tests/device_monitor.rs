// SPDX-License-Identifier: Apache-2.0

//! `ballast device-monitor` with a stand-in for NVIDIA's management library (fake_nvml.c) and for
//! the supervisor.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proto::fleet::v1::fleet_server::{Fleet, FleetServer};
use proto::fleet::v1::*;
use tonic::codegen::tokio_stream::Stream;
use tonic::{Request, Response};

use crate::harness::api::runtime;
use crate::harness::{ballast, eventually, preload_library, proc, text};

const GPU: &str = "GPU-00112233-4455-6677-8899-aabbccddeeff";

/// A supervisor that only takes reports.
#[derive(Clone, Default)]
struct ReportReceiver {
    reports: Arc<Mutex<Vec<DeviceReport>>>,
    refuses: Arc<Mutex<bool>>,
}

impl ReportReceiver {
    fn reports(&self) -> Vec<DeviceReport> {
        self.reports.lock().unwrap().clone()
    }

    fn xids(&self) -> Vec<u64> {
        self.reports().into_iter().flat_map(|report| report.new_xids).collect()
    }

    /// Waits until a report says this.
    #[track_caller]
    fn await_report(&self, what: &str, says: impl Fn(&DeviceReport) -> bool) -> DeviceReport {
        eventually(what, || self.reports().pop().filter(|report| says(report)))
    }
}

type Events<T> = Pin<Box<dyn Stream<Item = Result<T, tonic::Status>> + Send>>;

macro_rules! report_receiver {
    ($($method:ident: $request:ty => $response:ty,)*) => {
        #[tonic::async_trait]
        impl Fleet for ReportReceiver {
            type WatchEventsStream = Events<Event>;
            type LoadModelStream = Events<LoadModelEvent>;

            async fn report_devices(
                &self,
                request: Request<ReportDevicesRequest>,
            ) -> Result<Response<ReportDevicesResponse>, tonic::Status> {
                self.reports.lock().unwrap().extend(request.into_inner().devices);
                match *self.refuses.lock().unwrap() {
                    true => Err(tonic::Status::unavailable("the fleet is stopping")),
                    false => Ok(Response::new(ReportDevicesResponse {})),
                }
            }

            $(async fn $method(&self, _: Request<$request>) -> Result<Response<$response>, tonic::Status> {
                Err(tonic::Status::unimplemented("it only takes reports"))
            })*
        }
    };
}

report_receiver! {
    get_status: GetStatusRequest => Status,
    watch_events: WatchEventsRequest => Self::WatchEventsStream,
    restart_child: RestartChildRequest => RestartChildResponse,
    drain_worker: DrainWorkerRequest => DrainWorkerResponse,
    load_model: LoadModelRequest => Self::LoadModelStream,
    unload_model: UnloadModelRequest => UnloadModelResponse,
    wake_model: WakeModelRequest => WakeModelResponse,
    swap_model: SwapModelRequest => SwapModelResponse,
    add_worker: AddWorkerRequest => AddWorkerResponse,
    remove_worker: RemoveWorkerRequest => RemoveWorkerResponse,
    reload: ReloadRequest => ReloadResponse,
    quarantine_device: QuarantineDeviceRequest => QuarantineDeviceResponse,
    end_quarantine: EndQuarantineRequest => EndQuarantineResponse,
    stop_fleet: StopFleetRequest => StopFleetResponse,
}

/// A monitor of one GPU, and its supervisor.
struct MonitoredGpu {
    folder: tempfile::TempDir,
    monitor: Child,
    supervisor: ReportReceiver,
    _runtime: tokio::runtime::Runtime,
}

impl MonitoredGpu {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let supervisor = ReportReceiver::default();
        let (runtime, socket) = (runtime(), folder.path().join("supervisor.sock"));
        runtime.block_on(async {
            let services = service::grpc::server().add_service(FleetServer::new(supervisor.clone()));
            let listener = service::grpc::bind(&socket).unwrap();
            tokio::spawn(service::grpc::serve(services, listener, std::future::pending()));
        });
        let library = preload_library("fake_nvml", folder.path());
        std::fs::rename(library, folder.path().join("libnvidia-ml.so.1")).unwrap();
        let state = state_file(folder.path());
        std::fs::write(&state, "temperature 61\n").unwrap();
        let monitor = command(folder.path(), GPU)
            .env("LD_LIBRARY_PATH", folder.path())
            .env("BALLAST_TEST_NVML", state)
            .env("BALLAST_TEST_NVML_UUID", GPU)
            .spawn();
        Self { folder, monitor: monitor.unwrap(), supervisor, _runtime: runtime }
    }

    fn set(&self, state: &str) {
        let new = self.folder.path().join("new");
        std::fs::write(&new, state).unwrap();
        std::fs::rename(new, state_file(self.folder.path())).unwrap();
    }
}

impl Drop for MonitoredGpu {
    fn drop(&mut self) {
        let _ = self.monitor.kill();
        let _ = self.monitor.wait();
    }
}

fn state_file(folder: &Path) -> PathBuf {
    folder.join("nvml-state")
}

fn command(folder: &Path, device: &str) -> std::process::Command {
    let config = folder.join("device-monitor.toml");
    let socket = folder.join("supervisor.sock");
    std::fs::write(&config, format!("supervisor-socket = {socket:?}\ndevices = [{device:?}]\n")).unwrap();
    let mut command = ballast();
    command.arg("device-monitor").arg("--config").arg(config).stderr(Stdio::piped());
    command
}

#[test]
fn figures_faults_and_silence_of_a_gpu_are_reported() {
    let gpu = MonitoredGpu::start();
    let report = gpu.supervisor.await_report("the figures", |report| {
        report.figures.is_some_and(|figures| figures.temperature_celsius == Some(61))
    });
    let expected = DeviceFigures {
        temperature_celsius: Some(61),
        power_milliwatts: Some(312_500),
        utilization_percent: Some(42),
        memory_used_bytes: Some(2 << 30),
        memory_total_bytes: Some(8 << 30),
        corrected_ecc_errors: Some(5),
        uncorrected_ecc_errors: Some(0),
    };
    assert_eq!((report.device.as_str(), report.figures), (GPU, Some(expected)));
    assert_eq!((report.problem.as_str(), report.recovery_action.as_str()), ("", ""));

    // A supervisor that does not take the report gets the fault again.
    *gpu.supervisor.refuses.lock().unwrap() = true;
    gpu.set("temperature 61\nxid 79\n");
    eventually("two reports of the fault", || (gpu.supervisor.xids().len() >= 2).then_some(()));
    *gpu.supervisor.refuses.lock().unwrap() = false;
    gpu.supervisor.await_report("a report without the fault", |report| report.new_xids.is_empty());
    let told = gpu.supervisor.xids();
    assert!(told.iter().all(|xid| *xid == 79), "{told:?}");

    gpu.set("temperature 61\nxid 79\necc 3\naction 1\n");
    eventually("ECC errors", || {
        gpu.supervisor.reports().iter().any(|r| r.new_uncorrected_ecc_errors == 3).then_some(())
    });
    gpu.supervisor.await_report("the recovery action", |report| report.recovery_action == "reset the GPU");

    gpu.set("temperature 61\nxid 79\necc 3\nhangs\n");
    gpu.supervisor.await_report("silence", |report| report.unanswered_ms >= 3000);
    gpu.set("temperature 62\nxid 79\necc 3\n");
    gpu.supervisor.await_report("an answer", |report| report.unanswered_ms == 0);

    gpu.set("temperature 62\nxid 79\necc 3\nlost\n");
    let lost = gpu.supervisor.await_report("the loss", |report| !report.problem.is_empty());
    assert!(lost.problem.contains("fell off the bus"), "{}", lost.problem);
    let total: u32 = gpu.supervisor.reports().iter().map(|report| report.new_uncorrected_ecc_errors).sum();
    assert_eq!(total, 3, "no error is counted twice");
}

#[test]
fn a_monitor_that_was_stopped_does_not_take_the_gpu_for_silent() {
    let gpu = MonitoredGpu::start();
    gpu.supervisor.await_report("a report", |_| true);
    proc::send_signal(gpu.monitor.id(), "STOP");
    std::thread::sleep(Duration::from_secs(5));
    let before = gpu.supervisor.reports().len();
    proc::send_signal(gpu.monitor.id(), "CONT");
    eventually("three more reports", || (gpu.supervisor.reports().len() >= before + 3).then_some(()));
    let longest = gpu.supervisor.reports().iter().map(|report| report.unanswered_ms).max();
    assert!(longest.unwrap() <= 1000, "{longest:?}");
}

#[test]
fn a_monitor_whose_gpu_hangs_still_ends_when_it_is_told_to() {
    let mut gpu = MonitoredGpu::start();
    gpu.set("hangs\n");
    gpu.supervisor.await_report("silence", |report| report.unanswered_ms > 0);
    proc::send_signal(gpu.monitor.id(), "TERM");
    let ended = eventually("the monitor ends", || gpu.monitor.try_wait().unwrap());
    assert_eq!(ended.code(), Some(0));
}

#[test]
fn a_machine_without_the_library_is_no_error_and_a_wrong_device_is() {
    let folder = tempfile::tempdir().unwrap();
    if Path::new("/proc/driver/nvidia/version").exists() {
        return crate::harness::report_skipped(format_args!("this machine has NVIDIA's library"));
    }
    let mut monitor = command(folder.path(), GPU).spawn().unwrap();
    std::thread::sleep(Duration::from_secs(1));
    assert!(monitor.try_wait().unwrap().is_none(), "it waits");
    proc::send_signal(monitor.id(), "TERM");
    let output = monitor.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output).1.contains("GPUs have no figures"), "{}", text(&output).1);

    let output = command(folder.path(), "cuda:0").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output).1.contains("\"cuda:0\" in `devices` is not the UUID"), "{}", text(&output).1);
}
