// SPDX-License-Identifier: Apache-2.0

//! `ballast.toml`: the configuration of a fleet, and the specification of its processes that
//! follows from it.

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use cuda::DeviceSelector;
use device_monitor::MonitorConfig;
use memory::manifest::HOST_DEVICE;
use memory::numa::{self, is_host_device};
use serde::{Deserialize, Serialize};
use service::runtime_dir::WORKERS_MAX;
use service::{ByteSize, Exit, RuntimeDir};
use supervisor::mps::MpsConfig;
use supervisor::{ChildRole, FleetDevices, FleetSpec, GpuDevice, ModelSpec, SupervisionConfig, WorkerSlot};
use toml::{Table, Value};
use traces::TracingConfig;
use worker::ComputeDevice;

use crate::cli_error::{CliError, CliResult, IoContext};
use crate::config_source::ConfigSource;
use crate::device_choice::{DeviceChoice, usable_gpu};
use crate::device_selection::DeviceSelection;
use crate::devices::{self, GpuInfo, GpuInventory};
use crate::gpu_wait::discover_wanted;
use crate::model_config::{FleetModelConfig, to_toml_table};
use crate::models_directory::ModelsDirectoryConfig;
use crate::resident_models::ResidentModels;
use crate::sized_model::SizedModel;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct FleetConfig {
    /// Directory of the fleet's sockets. If absent, a new directory that is removed at the end.
    pub(crate) runtime_dir: Option<PathBuf>,
    /// Address of HTTP and gRPC. If absent, the router listens only on its socket in the runtime
    /// directory.
    pub(crate) listen: Option<SocketAddr>,
    /// Limit on host memory for weights, KV caches and workspaces together. If absent, the memory
    /// that is available at the start.
    pub(crate) host_budget: Option<ByteSize>,
    /// The same limit for each GPU that the fleet uses. If absent, all memory of the GPU. On GPUs
    /// with unified memory, `host_budget` is the limit.
    pub(crate) gpu_budget: Option<ByteSize>,
    /// Limits of the router's admission queues.
    #[serde(default)]
    pub(crate) admission: router::AdmissionConfig,
    /// How the router chooses workers.
    #[serde(default)]
    pub(crate) routing: router::RoutingConfig,
    /// How the workers of a GPU share it.
    #[serde(default)]
    pub(crate) gpu: GpuSharingConfig,
    /// Limits of the router on requests, connections and memory.
    #[serde(default)]
    pub(crate) router: router::RouterLimits,
    /// Who may call the API over TCP.
    #[serde(default)]
    pub(crate) access: router::AccessConfig,
    /// TLS of the TCP address. If absent, it speaks plain HTTP.
    pub(crate) tls: Option<router::TlsConfig>,
    /// Where router and workers send spans of requests. If absent, they record none.
    pub(crate) tracing: Option<TracingConfig>,
    /// When the supervisor replaces a process.
    #[serde(default)]
    pub(crate) supervision: SupervisionConfig,
    #[serde(default)]
    pub(crate) models: Vec<FleetModelConfig>,
    /// A directory whose files are models too.
    pub(crate) models_directory: Option<ModelsDirectoryConfig>,
    /// The file that this was read from.
    #[serde(skip)]
    pub(crate) source: Option<ConfigSource>,
}

/// A driver without persistence mode starts each GPU in seconds, and the fabric of eight GPUs is
/// set up within half a minute. Less than the time that systemd gives a start.
const GPU_WAIT: Duration = Duration::from_secs(45);

/// How the workers of a GPU share it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub(crate) struct GpuSharingConfig {
    /// Workers compute one after the other, so that none is preempted in the middle of a step.
    pub(crate) turns: bool,
    /// Workers compute at the same time, through NVIDIA's MPS. A fatal fault of one worker then
    /// ends all workers of the GPU. Turns are off.
    pub(crate) mps: bool,
    /// How long the start waits for a GPU that the machine has and the driver cannot use yet.
    #[serde(with = "service::duration")]
    pub(crate) wait: Duration,
}

impl Default for GpuSharingConfig {
    fn default() -> Self {
        Self { turns: true, mps: false, wait: GPU_WAIT }
    }
}

impl FleetConfig {
    /// Reads `ballast.toml`. Relative model paths are relative to the file. A `runtime_dir`
    /// argument overrides the file's.
    pub(crate) fn load(path: &Path, runtime_dir: Option<&Path>) -> CliResult<Self> {
        let mut config: FleetConfig = service::config::load(path)?;
        let base = path.parent().unwrap_or(Path::new(""));
        for model in &mut config.models {
            model.path = base.join(&model.path);
            model.chat_template = model.chat_template.take().map(|file| base.join(file));
        }
        if let Some(directory) = &mut config.models_directory {
            directory.path = base.join(&directory.path);
        }
        config.access.keys = config.access.keys.take().map(|keys| base.join(keys));
        config.access.usage_log = config.access.usage_log.take().map(|file| base.join(file));
        let reports = &mut config.supervision.crash_reports;
        *reports = reports.take().map(|directory| base.join(directory));
        config.tls = config.tls.map(|tls| tls.below(base));
        let invalid = |error: &dyn std::fmt::Display| {
            CliError::new(Exit::Usage, format!("configuration {}: {error}", path.display()))
        };
        config.admission.check().map_err(|error| invalid(&error))?;
        config.router.check().map_err(|error| invalid(&error))?;
        config.access.check()?;
        config.tls.as_ref().map_or(Ok(()), router::TlsConfig::check)?;
        config.tracing.as_ref().map_or(Ok(()), TracingConfig::check).map_err(|error| invalid(&error))?;
        config.supervision.check().map_err(|error| invalid(&error))?;
        config.models.iter().try_for_each(FleetModelConfig::check).map_err(|text| invalid(&text))?;
        let directory = config.models_directory.as_ref().map_or(Ok(()), ModelsDirectoryConfig::check);
        directory.map_err(|text| invalid(&text))?;
        let total = |model: &FleetModelConfig| u64::from(model.workers) * u64::from(model.device.count_min());
        let at_start = config.models.iter().filter(|model| !model.on_demand);
        check_worker_count(at_start.map(total).sum()).map_err(|text| invalid(&text))?;
        check_names(&config.models).map_err(|text| invalid(&text))?;
        config.source = Some(ConfigSource::new(path, &config)?);
        if let Some(runtime_dir) = runtime_dir {
            config.runtime_dir = Some(runtime_dir.to_owned());
        }
        Ok(config)
    }

    /// Reads the header of every model file and computes its memory, except of models that are
    /// resident and have no readable file. Lists the GPUs if a model may use one, and waits for
    /// those that are not ready.
    pub(crate) fn sized_without(&self, resident: &ResidentModels) -> CliResult<Vec<SizedModel>> {
        let readable = self.models.iter().filter(|model| resident.get(&model.name).is_none());
        let readable: Vec<FleetModelConfig> = readable.cloned().collect();
        let wanted: Vec<&DeviceSelection> = readable.iter().map(|model| &model.device).collect();
        let seen = match wanted.iter().all(|device| device.is_on_host()) {
            true => GpuInventory::default(),
            false => discover_wanted(&wanted, self.gpu.wait)?,
        };
        let unreadable = self.models.iter().filter_map(|model| resident.get(&model.name));
        let others = unreadable.map(|recorded| recorded.spec().total_workers()).sum();
        SizedModel::all(&readable, others, &seen)
    }

    /// Builds the specification of the fleet for the supervisor. `socket` is the public socket, if
    /// socket activation has bound it.
    pub(crate) fn plan(
        &self,
        directory: &RuntimeDir,
        socket: Option<OwnedFd>,
        log: tracing::Level,
        sized: &[SizedModel],
        resident: &ResidentModels,
    ) -> CliResult<FleetSpec> {
        let models = self.model_specs(sized, resident)?;
        for ModelSpec { name, fallback, .. } in &models {
            if let Some(why) = fallback {
                tracing::error!(model = name, why, "on the host, not on a GPU");
            }
        }
        // With `device = "all"`, the number of devices is known only here.
        let at_start = models.iter().filter(|model| !model.on_demand);
        check_worker_count(at_start.map(|model| u64::from(model.total_workers())).sum())
            .map_err(|text| CliError::new(Exit::Usage, text))?;
        let (of_workers, sharing) = (directory.clone(), self.gpu);
        let tracing = self.tracing.as_ref().map(to_toml_table).transpose()?;
        let worker = move |slot: &WorkerSlot, table: &mut Table| {
            let mut set = |key: &str, value: String| table.insert(key.to_owned(), Value::String(value));
            set("name", slot.name());
            set("model", slot.weights.clone());
            if slot.model != slot.weights {
                set("served-model", slot.model.clone());
            }
            set("weights-socket", of_workers.weights_socket().to_string_lossy().into_owned());
            set("listen", of_workers.worker_socket(slot.index).to_string_lossy().into_owned());
            let device = table.get("device").and_then(Value::as_str).unwrap_or(HOST_DEVICE).to_owned();
            if sharing.turns && !sharing.mps && !is_host_device(&device) {
                let file = of_workers.turn_file(&device).to_string_lossy().into_owned();
                table.insert("turn-file".to_owned(), Value::String(file));
            }
            if sharing.mps && !is_host_device(&device) {
                let mps = of_workers.mps_directory().to_string_lossy().into_owned();
                table.insert("mps-directory".to_owned(), Value::String(mps));
            }
            if let Some(tracing) = &tracing {
                table.insert("tracing".to_owned(), Value::Table(tracing.clone()));
            }
        };
        let (listen, router_socket) = self.listen(directory, socket)?;
        let of_directory = self.directory_devices()?;
        let choices = sized.iter().flat_map(|model| &model.copies).map(|copy| &copy.choice);
        let gpus = choices.chain(&of_directory).filter_map(|choice| choice.gpu.as_ref());
        self.check_gpu_budget(gpus.clone())?;
        let monitor = MonitorConfig { supervisor_socket: directory.supervisor_socket(), devices: Vec::new() };
        let of_fleet = self.clone();
        Ok(FleetSpec {
            weight_server: self.weight_server(directory),
            router: to_toml_table(&self.router_config(directory, listen))?,
            devices: FleetDevices::new(self.gpu_devices(gpus)),
            find_gpu: Arc::new(move |id| of_fleet.find_gpu(id)),
            mps: self.gpu.mps.then(|| MpsConfig { directory: directory.mps_directory() }),
            device_monitor: Some(to_toml_table(&monitor)?),
            router_socket,
            http_address: listen.map(|address| address.to_string()).unwrap_or_default(),
            log,
            models,
            unusable: Vec::new(),
            supervision: self.supervision.clone(),
            complete_worker_config: Arc::new(worker),
            read_again: self
                .source
                .clone()
                .map(|source| source.reader(self.clone(), directory.clone(), listen)),
        })
    }

    /// Where models come that are not in the models directory yet.
    fn directory_devices(&self) -> CliResult<Vec<DeviceChoice>> {
        let Some(directory) = &self.models_directory else { return Ok(Vec::new()) };
        let seen = devices_for([&directory.device])?;
        directory.device.choose("models-directory", &seen, None)
    }

    /// The specification of every model, from its sizes or from its predecessor's record.
    pub(crate) fn model_specs(
        &self,
        sized: &[SizedModel],
        resident: &ResidentModels,
    ) -> CliResult<Vec<ModelSpec>> {
        let planned = |config: &FleetModelConfig| match resident.get(&config.name) {
            Some(recorded) => Some(Ok(recorded.spec())),
            None => sized.iter().find(|model| model.name == config.name).map(SizedModel::plan),
        };
        self.models.iter().filter_map(planned).collect()
    }

    pub(crate) fn router_config(
        &self,
        directory: &RuntimeDir,
        listen: Option<SocketAddr>,
    ) -> router::RouterConfig {
        let mut router = router::RouterConfig::new(listen, directory.path().to_owned());
        router.admission = self.admission;
        router.routing = self.routing;
        router.limits = self.router.clone();
        router.access = self.access.absolute();
        router.tls = self.tls.as_ref().map(router::TlsConfig::absolute);
        router.tracing = self.tracing.clone();
        router
    }

    /// Binds the public socket, unless a running router is adopted: it keeps its socket and
    /// address.
    fn listen(
        &self,
        directory: &RuntimeDir,
        socket: Option<OwnedFd>,
    ) -> CliResult<(Option<SocketAddr>, Option<OwnedFd>)> {
        if let Some(socket) = socket {
            let listener = TcpListener::from(socket);
            let address =
                listener.local_addr().with_context(|| "the socket of socket activation".to_owned())?;
            return Ok((Some(address), Some(listener.into())));
        }
        let Some(wanted) = self.listen else { return Ok((None, None)) };
        let living =
            directory.living_children().with_context(|| "cannot read the runtime directory".to_owned())?;
        let router = ChildRole::Router.subcommand();
        if living.iter().any(|(name, _)| name == router) {
            let present: router::RouterConfig = service::config::load(&directory.config(router))?;
            return Ok((present.listen, None));
        }
        let what = || format!("cannot listen on {wanted}; choose another address with --listen");
        let listener = TcpListener::bind(wanted).with_context(what)?;
        let address = listener.local_addr().with_context(what)?;
        Ok((Some(address), Some(listener.into())))
    }

    /// Most bytes that the fleet may use on a GPU with memory of its own.
    pub(crate) fn budget_of(&self, gpu: &GpuInfo) -> u64 {
        self.gpu_budget.map_or(gpu.total_bytes, |budget| budget.0.min(gpu.total_bytes))
    }

    /// A limit that would limit nothing is an error.
    pub(crate) fn check_gpu_budget<'a>(&self, gpus: impl Iterator<Item = &'a GpuInfo>) -> CliResult {
        let gpus: Vec<&GpuInfo> = gpus.collect();
        match gpus.first() {
            Some(gpu) if self.gpu_budget.is_some() && gpus.iter().all(|gpu| gpu.integrated) => {
                let text = format!(
                    "`gpu-budget`: cuda:{} {} has no memory of its own; `host-budget` limits what the fleet \
                     takes of the memory that it shares with the host",
                    gpu.ordinal, gpu.name
                );
                Err(CliError::new(Exit::Usage, text))
            }
            _ => Ok(()),
        }
    }

    /// Most bytes that the fleet may use on the host if it started now, with these GPUs.
    pub(crate) fn host_bytes<'a>(&self, gpus: impl Iterator<Item = &'a GpuInfo>) -> u64 {
        let available = || {
            let of_gpus = numa::available_on(gpus.filter_map(|gpu| gpu.numa_node));
            service::meminfo::available_bytes().unwrap_or(u64::MAX).saturating_sub(of_gpus)
        };
        self.host_budget.map_or_else(available, |budget| budget.0)
    }

    /// Without `devices`.
    fn weight_server(&self, directory: &RuntimeDir) -> Table {
        let mut table = Table::new();
        let runtime_dir = directory.path().to_string_lossy().into_owned();
        table.insert("runtime-dir".to_owned(), Value::String(runtime_dir));
        if let Some(budget) = self.host_budget {
            table.insert("host-budget".to_owned(), Value::String(budget.to_string()));
        }
        table
    }

    /// Each GPU once, with what the fleet may use of it.
    pub(crate) fn gpu_devices<'a>(&self, gpus: impl Iterator<Item = &'a GpuInfo>) -> Vec<GpuDevice> {
        let mut gpus: Vec<&GpuInfo> = gpus.collect();
        gpus.sort_by_key(|gpu| gpu.ordinal);
        gpus.dedup();
        gpus.into_iter().map(|gpu| self.gpu_device(gpu)).collect()
    }

    fn gpu_device(&self, gpu: &GpuInfo) -> GpuDevice {
        let budget = (!gpu.integrated).then(|| ByteSize(self.budget_of(gpu)));
        GpuDevice::new(gpu.uuid.clone(), budget, gpu.numa_node)
    }

    /// Looks for a GPU that a load names. Asks the driver through a child process, which sees the
    /// GPUs that the other processes of the fleet see.
    fn find_gpu(&self, id: &str) -> Result<GpuDevice, String> {
        let Ok(ComputeDevice::Gpu(selector @ DeviceSelector::Uuid(_))) = id.parse() else {
            return Err("it is no device; a load names \"host\", \"host:N\" or the UUID of a GPU".to_owned());
        };
        let seen = devices::discover_gpus().map_err(|failure| failure.message().to_owned())?;
        usable_gpu(selector, &seen, "the fleet").map(|gpu| self.gpu_device(gpu))
    }
}

fn check_worker_count(workers: u64) -> Result<(), String> {
    match workers > u64::from(WORKERS_MAX) {
        true => Err(format!("the models have {workers} workers, a fleet may have {WORKERS_MAX}")),
        false => Ok(()),
    }
}

/// A name means one model, whether it is its own or an alias.
pub(crate) fn check_names(models: &[FleetModelConfig]) -> Result<(), String> {
    let mut seen = BTreeSet::new();
    for name in models.iter().flat_map(|model| std::iter::once(&model.name).chain(&model.aliases)) {
        if name.is_empty() {
            return Err("a model has an empty name or alias".to_owned());
        }
        if !seen.insert(name) {
            return Err(format!("two models have the name {name:?}, or one has it twice (`aliases` count)"));
        }
    }
    Ok(())
}

/// Lists the GPUs, unless all models run on the host.
pub(crate) fn devices_for<'a>(
    wanted: impl IntoIterator<Item = &'a DeviceSelection>,
) -> CliResult<GpuInventory> {
    match wanted.into_iter().all(|wanted| wanted.is_on_host()) {
        true => Ok(GpuInventory::default()),
        false => devices::discover_gpus(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device_choice::DeviceOption;
    use crate::model_config::DEFAULT_WORKERS;

    #[test]
    fn a_fleet_of_two_models_reads_from_toml() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ballast.toml");
        let text = "listen = \"127.0.0.1:9000\"\n[[models]]\nname = \"a\"\npath = \"a.gguf\"\nkv-bytes = \"64MiB\"\n\
                    [[models]]\nname = \"b\"\npath = \"/b.gguf\"\nworkers = 1\n";
        std::fs::write(&path, text).unwrap();
        let config = FleetConfig::load(&path, Some(Path::new("/run/x"))).unwrap();
        assert_eq!(config.models[0].path, directory.path().join("a.gguf"));
        assert_eq!((config.models[0].workers, config.models[1].workers), (DEFAULT_WORKERS, 1));
        assert_eq!(config.models[1].path, Path::new("/b.gguf"));
        assert_eq!(config.runtime_dir.as_deref(), Some(Path::new("/run/x")));

        assert_eq!(config.admission, router::AdmissionConfig::default());
        let admission = "[admission]\ntenant-queue-max = 5\nbatch-floor = 20\n";
        std::fs::write(&path, format!("{text}{admission}")).unwrap();
        let bounded = FleetConfig::load(&path, None).unwrap().admission;
        assert_eq!((bounded.tenant_queue_max, bounded.batch_floor), (5, 20));
        assert_eq!(bounded.queue_max, config.admission.queue_max);
        assert_eq!(config.routing.mode, router::RoutingMode::Auto);
        for mode in router::RoutingMode::ALL {
            std::fs::write(&path, format!("{text}[routing]\nmode = {:?}\n", mode.name())).unwrap();
            assert_eq!(FleetConfig::load(&path, None).unwrap().routing.mode, mode);
        }
        std::fs::write(&path, format!("{text}[admission]\nbatch-floor = 95\n")).unwrap();
        let failure = FleetConfig::load(&path, None).unwrap_err();
        assert_eq!(failure.exit, Exit::Usage);
        assert!(failure.message().contains("batch-floor"), "{}", failure.message());

        let limits =
            "[router]\nrequest-timeout = \"90s\"\nconnections-max = 16\nhealth-listen = \"127.0.0.1:9100\"\n";
        std::fs::write(&path, format!("{text}{limits}")).unwrap();
        let bounded = FleetConfig::load(&path, None).unwrap().router;
        assert_eq!((bounded.request_timeout.as_secs(), bounded.connections_max), (90, 16));
        assert_eq!(bounded.body_max, config.router.body_max);
        std::fs::write(&path, format!("{text}[router]\nbytes-max = \"1MiB\"\n")).unwrap();
        let failure = FleetConfig::load(&path, None).unwrap_err();
        assert!(failure.message().contains("`router.bytes-max` is 1MiB"), "{}", failure.message());

        std::fs::write(&path, text.replace("\"b\"", "\"a\"")).unwrap();
        let failure = FleetConfig::load(&path, None).unwrap_err();
        assert_eq!(failure.exit, Exit::Usage);
        assert!(failure.message().contains("two models have the name \"a\""), "{}", failure.message());
    }

    #[test]
    fn the_example_in_the_tree_is_a_fleet() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/ballast.toml");
        let config = FleetConfig::load(&path, None).unwrap();
        assert!(config.models.iter().all(|model| model.path.exists()), "{:?}", config.models);
        let host = DeviceSelection::One(DeviceOption::Host);
        let on_host = |model: &FleetModelConfig| FleetModelConfig { device: host.clone(), ..model.clone() };
        let models: Vec<FleetModelConfig> = config.models.iter().map(on_host).collect();
        for sized in SizedModel::all(&models, 0, &GpuInventory::default()).unwrap() {
            sized.plan().unwrap();
        }
    }

    #[test]
    fn a_worker_has_room_for_the_model_that_drafts_for_it() {
        let path = |name| Path::new(env!("CARGO_MANIFEST_DIR")).join("../demo").join(name);
        let text = format!(
            "[[models]]\nname = \"large\"\npath = {:?}\ndraft = \"small\"\ndevice = \"host\"\nkv-tokens = 1024\n\
             [[models]]\nname = \"small\"\npath = {:?}\nworkers = 0\ndevice = \"host\"\n",
            path("pycoder-22m-q4_k_m.gguf"),
            path("pycoder-7m-q8_0.gguf")
        );
        let directory = tempfile::tempdir().unwrap();
        let sized = |text: &str| {
            let path = directory.path().join("fleet.toml");
            std::fs::write(&path, text).unwrap();
            FleetConfig::load(&path, None)
                .unwrap()
                .sized_without(&ResidentModels::default())
                .map(|mut sized| sized.remove(0))
        };
        let of = |model: &SizedModel| {
            let spec = model.plan().unwrap();
            (model.copies[0].demand, spec.copies[0].worker_config["workspace-bytes"].clone())
        };
        let (alone, drafted) =
            (sized(&text.replace("draft = \"small\"\n", "")).unwrap(), sized(&text).unwrap());
        let ((alone, _), (drafted, reserved)) = (of(&alone), of(&drafted));
        let more = drafted.workspace.total() - alone.workspace.total();
        // 512 rows of logits for draft tokens, 8,000 values each, and activations. Both models
        // share the kernels' scratch memory.
        assert!((17 << 20..24 << 20).contains(&more), "{more} bytes");
        assert!(drafted.kv > alone.kv);
        assert_eq!(reserved.as_str(), Some(ByteSize(drafted.workspace.total()).to_string().as_str()));

        let failure = sized(&text.replace("name = \"small\"", "name = \"other\"")).map(drop).unwrap_err();
        assert!(
            failure.message().contains("its draft model \"small\" is not in this fleet"),
            "{}",
            failure.message()
        );
    }

    #[test]
    fn a_gpu_becomes_a_device_of_the_fleet() {
        let gpu = GpuInfo {
            ordinal: 0,
            uuid: "GPU-00112233-4455-6677-8899-aabbccddeeff".to_owned(),
            name: "NVIDIA H200".to_owned(),
            compute_capability: 90,
            total_bytes: 140 << 30,
            free_bytes: None,
            integrated: false,
            numa_node: Some(1),
            unusable: None,
        };
        let config = FleetConfig {
            runtime_dir: None,
            listen: None,
            host_budget: None,
            gpu_budget: Some(ByteSize(100 << 30)),
            admission: router::AdmissionConfig::default(),
            routing: router::RoutingConfig::default(),
            gpu: GpuSharingConfig::default(),
            router: router::RouterLimits::default(),
            access: router::AccessConfig::default(),
            tls: None,
            tracing: None,
            supervision: SupervisionConfig::default(),
            models: Vec::new(),
            models_directory: None,
            source: None,
        };
        let unified = GpuInfo { ordinal: 1, uuid: GpuInfo::h200(7).uuid, ..GpuInfo::gb10() };
        let gpus = [&gpu, &unified, &gpu];
        config.check_gpu_budget(gpus.into_iter()).unwrap();
        let refused = config.check_gpu_budget([&unified].into_iter()).unwrap_err();
        assert!(refused.message().contains("cuda:1 NVIDIA GB10 has no memory of its own"), "{refused:?}");
        let devices = config.gpu_devices(gpus.into_iter());
        let expected = [
            GpuDevice::new(gpu.uuid, Some(ByteSize(100 << 30)), Some(1)),
            GpuDevice::new(unified.uuid, None, None),
        ];
        assert_eq!(devices, expected);
        for (id, why) in [("cuda:1", "it is no device"), ("gpu", "it is no device")] {
            assert!(config.find_gpu(id).unwrap_err().starts_with(why), "{id}");
        }
    }
}
