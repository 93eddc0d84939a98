// SPDX-License-Identifier: Apache-2.0

//! What differs between a running fleet and its configuration, read again. A plain value: the event
//! loop applies it, `ballast reload` prints it.
//!
//! A change applies to the processes that it names and to no other. Models that a command loaded
//! are not in the configuration, and no change names them.

use std::collections::BTreeMap;
use std::time::Duration;

use toml::{Table, Value};

use crate::spec::{CopySpec, ModelSpec};

/// Of a longer text, or one of several lines, only the length is printed: a chat template.
const SHOWN_BYTES_MAX: usize = 256;

/// A key of the configuration with its old and its new value; absent values are empty.
#[derive(Clone, Debug, PartialEq)]
pub struct SettingChange {
    /// With the tables that it stands in: "admission.queue-max".
    pub key: String,
    pub from: Option<Value>,
    pub to: Option<Value>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum SpecChange {
    /// Its workers finish their streams, then it is unloaded.
    ModelRemoved { name: String },
    /// It is loaded and its workers start.
    ModelAdded { spec: ModelSpec },
    /// The file of a model that is loaded on demand has other content. The model leaves after its
    /// streams, and the next request loads the new file.
    FileReplaced { spec: ModelSpec },
    /// Copies on further devices are loaded, and then get workers. On devices that the list no
    /// longer has, the workers finish their streams, then the copy is unloaded. The lists have a
    /// device in common, which serves meanwhile.
    ModelDevices { from: Vec<String>, spec: ModelSpec },
    /// On each device, the last workers drain and stop, or more start.
    WorkerCount { model: String, devices: u32, from: u32, to: u32 },
    /// The workers of the model restart with new settings, one after the other.
    WorkerSettings { model: String, changes: Vec<SettingChange>, copies: Vec<CopySpec>, settings: Table },
    /// The idle clock of the model gets another limit. No process changes.
    IdleUnload { model: String, from: Option<Duration>, to: Option<Duration>, settings: Table },
    /// The router restarts; it finishes its streams first.
    RouterSettings { changes: Vec<SettingChange>, router_config: Table },
    /// Only a restart of the supervisor applies it.
    NotApplied { change: SettingChange },
}

/// The parts of a fleet that a configuration determines.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ComparedSpec<'a> {
    pub(crate) router: &'a Table,
    pub(crate) models: &'a [ModelSpec],
}

/// All changes from `running` to `wanted`, in the order in which they apply. Models leave before
/// others come, because they may need the same memory.
pub(crate) fn diff_specs(running: ComparedSpec<'_>, wanted: ComparedSpec<'_>) -> Vec<SpecChange> {
    let named = |models: &'_ [ModelSpec], name: &str| models.iter().any(|model| model.name == name);
    let mut changes: Vec<SpecChange> = Vec::new();
    let removed = running.models.iter().filter(|model| !named(wanted.models, &model.name));
    changes.extend(removed.map(|model| SpecChange::ModelRemoved { name: model.name.clone() }));
    for model in wanted.models {
        match running.models.iter().find(|known| known.name == model.name) {
            Some(known) => changes.extend(diff_models(known, model)),
            None => changes.push(SpecChange::ModelAdded { spec: model.clone() }),
        }
    }
    let router = diff_settings(running.router, wanted.router);
    if !router.is_empty() {
        let router_config = wanted.router.clone();
        changes.push(SpecChange::RouterSettings { changes: router, router_config });
    }
    changes
}

fn diff_models(known: &ModelSpec, wanted: &ModelSpec) -> Vec<SpecChange> {
    let ModelSpec { name, path, workers, copies, pack, idle_unload, settings, .. } = wanted;
    if wanted.on_demand && known.files != wanted.files {
        return vec![SpecChange::FileReplaced { spec: wanted.clone() }];
    }
    let fixed = |key: &str, from: Value, to: Value| {
        let change = SettingChange { key: format!("{key} of model {name}"), from: Some(from), to: Some(to) };
        (change.from != change.to).then_some(SpecChange::NotApplied { change })
    };
    let text = |path: &std::path::Path| Value::String(path.to_string_lossy().into_owned());
    let weights =
        [fixed("path", text(&known.path), text(path)), fixed("pack", known.pack.into(), (*pack).into())];
    let mut changes: Vec<SpecChange> = weights.into_iter().flatten().collect();
    let has_common_device = known.devices().any(|device| wanted.copy_on(device).is_some());
    let has_same_devices = is_subset(known, wanted) && is_subset(wanted, known);
    let is_applied = changes.is_empty() && has_common_device;
    if !has_same_devices && !is_applied {
        changes.extend(fixed("device", device_value(known), device_value(wanted)));
    }
    // The settings of the workers follow from the file and the device. Other weights are needed for
    // new ones.
    let differing = diff_copies(&known.copies, copies);
    if changes.is_empty() && !differing.is_empty() {
        let (copies, settings) = (copies.clone(), settings.clone());
        let model = name.clone();
        changes.push(SpecChange::WorkerSettings { model, changes: differing, copies, settings });
    }
    if !has_same_devices && is_applied {
        let from = known.devices().map(str::to_owned).collect();
        // Before the workers that are there get new settings, and more.
        changes.insert(0, SpecChange::ModelDevices { from, spec: wanted.clone() });
    }
    if known.workers != *workers {
        let devices = if is_applied { copies.len() } else { known.copies.len() };
        let devices = u32::try_from(devices).unwrap_or(u32::MAX);
        let (model, from, to) = (name.clone(), known.workers, *workers);
        changes.push(SpecChange::WorkerCount { model, devices, from, to });
    }
    if known.idle_unload != *idle_unload {
        let (model, from, to) = (name.clone(), known.idle_unload, *idle_unload);
        changes.push(SpecChange::IdleUnload { model, from, to, settings: settings.clone() });
    }
    changes
}

fn is_subset(model: &ModelSpec, of: &ModelSpec) -> bool {
    model.devices().all(|device| of.copy_on(device).is_some())
}

/// One device as a string, several as an array, as in the configuration.
fn device_value(model: &ModelSpec) -> Value {
    match &model.copies[..] {
        [copy] => copy.device.as_str().into(),
        copies => copies.iter().map(|copy| Value::from(copy.device.as_str())).collect::<Vec<_>>().into(),
    }
}

/// Each change of the workers' settings once, whichever devices it concerns.
fn diff_copies(known: &[CopySpec], wanted: &[CopySpec]) -> Vec<SettingChange> {
    let mut changes: Vec<SettingChange> = Vec::new();
    for wanted in wanted {
        let Some(known) = known.iter().find(|known| known.device == wanted.device) else { continue };
        let differing = diff_settings(&known.worker_config, &wanted.worker_config);
        let new: Vec<SettingChange> =
            differing.into_iter().filter(|change| !changes.contains(change)).collect();
        changes.extend(new);
    }
    changes
}

/// The keys whose values differ, with the names of the tables that they stand in.
pub fn diff_settings(from: &Table, to: &Table) -> Vec<SettingChange> {
    let (from, to) = (flatten(from), flatten(to));
    let mut keys: Vec<&String> = from.keys().chain(to.keys()).collect();
    keys.sort_unstable();
    keys.dedup();
    let change = |key: &String| SettingChange {
        key: key.clone(),
        from: from.get(key).cloned(),
        to: to.get(key).cloned(),
    };
    keys.into_iter().map(change).filter(|change| change.from != change.to).collect()
}

fn flatten(table: &Table) -> BTreeMap<String, Value> {
    let mut flat = BTreeMap::new();
    for (key, value) in table {
        match value {
            Value::Table(inner) => {
                flat.extend(flatten(inner).into_iter().map(|(name, value)| (format!("{key}.{name}"), value)));
            }
            value => {
                flat.insert(key.clone(), value.clone());
            }
        }
    }
    flat
}

impl std::fmt::Display for SettingChange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let shown = |value: &Option<Value>| match value {
            None => "default".to_owned(),
            Some(Value::String(text)) if text.len() > SHOWN_BYTES_MAX || text.contains('\n') => {
                format!("({} bytes)", text.len())
            }
            Some(value) => value.to_string(),
        };
        write!(f, "{} {} -> {}", self.key, shown(&self.from), shown(&self.to))
    }
}

impl std::fmt::Display for SpecChange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let list = |changes: &[SettingChange]| {
            changes.iter().map(SettingChange::to_string).collect::<Vec<_>>().join(", ")
        };
        match self {
            SpecChange::ModelRemoved { name } => write!(f, "model {name} is removed after its streams"),
            SpecChange::FileReplaced { spec } => {
                write!(f, "model {} is loaded from its new file on the next request", spec.name)
            }
            SpecChange::ModelAdded { spec } if spec.on_demand => {
                write!(f, "model {} is there for requests: {}", spec.name, spec.path.display())
            }
            SpecChange::ModelAdded { spec } => {
                let (name, path, workers) = (&spec.name, spec.path.display(), spec.workers);
                write!(f, "model {name} is loaded from {path}, workers: {workers}")?;
                match spec.copies.len() {
                    1 => Ok(()),
                    devices => write!(f, " on each of {devices} devices"),
                }
            }
            SpecChange::ModelDevices { from, spec } => {
                let to = spec.devices().collect::<Vec<_>>().join(", ");
                write!(f, "devices of model {}: {} -> {to}", spec.name, from.join(", "))
            }
            SpecChange::WorkerCount { model, devices, from, to } => {
                write!(f, "workers of model {model}: {from} -> {to}")?;
                match devices {
                    1 => Ok(()),
                    devices => write!(f, " on each of {devices} devices"),
                }
            }
            SpecChange::WorkerSettings { model, changes, .. } => {
                write!(f, "workers of model {model} restart one after the other: {}", list(changes))
            }
            SpecChange::IdleUnload { model, from, to, .. } => {
                let shown = |limit: &Option<Duration>| {
                    limit.map_or_else(|| "never".to_owned(), service::duration::format)
                };
                write!(f, "idle-unload of model {model}: {} -> {}", shown(from), shown(to))
            }
            SpecChange::RouterSettings { changes, .. } => {
                write!(f, "the router restarts after its streams: {}", list(changes))
            }
            SpecChange::NotApplied { change } => {
                write!(f, "not applied until the supervisor restarts: {change}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::spec::CopyMemory;

    fn model(name: &str, workers: u32, worker_config: &str) -> ModelSpec {
        ModelSpec {
            name: name.to_owned(),
            path: format!("/models/{name}.gguf").into(),
            workers,
            copies: vec![CopySpec {
                device: "host".to_owned(),
                weights: name.to_owned(),
                worker_config: worker_config.parse().unwrap(),
                memory: CopyMemory::default(),
            }],
            pack: true,
            files: String::new(),
            configured_path: std::path::PathBuf::new(),
            idle_unload: None,
            on_demand: false,
            fallback: None,
            settings: Table::new(),
        }
    }

    fn lines(running: (&str, &[ModelSpec]), wanted: (&str, &[ModelSpec])) -> Vec<String> {
        let [running_router, wanted_router] = [running.0, wanted.0].map(|text| text.parse().unwrap());
        let running = ComparedSpec { router: &running_router, models: running.1 };
        let wanted = ComparedSpec { router: &wanted_router, models: wanted.1 };
        diff_specs(running, wanted).iter().map(SpecChange::to_string).collect()
    }

    #[test]
    fn each_difference_names_the_processes_that_it_changes() {
        let running =
            [model("gone", 1, ""), model("kept", 2, "threads = 1\n[kv]\nbytes = 1"), model("same", 1, "")];
        let wanted =
            [model("same", 1, ""), model("kept", 3, "threads = 2\n[kv]\nbytes = 1"), model("new", 1, "")];
        let found = lines(
            ("[admission]\nqueue-max = 5", &running),
            ("[admission]\nqueue-max = 6\nbatch-floor = 1", &wanted),
        );
        let expected = [
            "model gone is removed after its streams",
            "workers of model kept restart one after the other: threads 1 -> 2",
            "workers of model kept: 2 -> 3",
            "model new is loaded from /models/new.gguf, workers: 1",
            "the router restarts after its streams: admission.batch-floor default -> 1, \
             admission.queue-max 5 -> 6",
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn other_weights_of_a_model_are_named_and_not_applied() {
        let known = [model("a", 1, "threads = 1")];
        let mut wanted = known.clone();
        wanted[0].path = "/other.gguf".into();
        wanted[0].copies[0].worker_config = "threads = 9".parse().unwrap();
        wanted[0].pack = false;
        let found = lines(("", &known), ("", &wanted));
        let expected = [
            "not applied until the supervisor restarts: path of model a \"/models/a.gguf\" -> \
             \"/other.gguf\"",
            "not applied until the supervisor restarts: pack of model a true -> false",
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_change_on_every_device_is_named_once() {
        let copy = |device: &str, settings: &str| CopySpec {
            device: device.to_owned(),
            weights: "a".to_owned(),
            worker_config: settings.parse().unwrap(),
            memory: CopyMemory::default(),
        };
        let on = |copies: Vec<CopySpec>, workers| ModelSpec { copies, ..model("a", workers, "") };
        let known = [on(vec![copy("host:0", "threads = 1"), copy("host:1", "threads = 1")], 1)];
        let wanted = [on(vec![copy("host:0", "threads = 2"), copy("host:1", "threads = 2")], 2)];
        let expected = [
            "workers of model a restart one after the other: threads 1 -> 2",
            "workers of model a: 1 -> 2 on each of 2 devices",
        ];
        assert_eq!(lines(("", &known), ("", &wanted)), expected);
    }

    #[test]
    fn another_list_of_devices_is_applied_if_one_device_stays() {
        let copy = |device: &str| CopySpec {
            device: device.to_owned(),
            weights: String::new(),
            worker_config: "threads = 1".parse().unwrap(),
            memory: CopyMemory::default(),
        };
        let on = |devices: &[&str], workers| {
            let copies = devices.iter().map(|device| copy(device)).collect();
            [ModelSpec { copies, ..model("a", workers, "") }]
        };
        let two = on(&["host:0", "host:1"], 1);
        let found = |wanted: &[ModelSpec]| lines(("", &two), ("", wanted));
        assert_eq!(found(&on(&["host:1", "host:0"], 1)), [""; 0], "the order means nothing");
        let fewer = ["devices of model a: host:0, host:1 -> host:1", "workers of model a: 1 -> 3"];
        assert_eq!(found(&on(&["host:1"], 3)), fewer);
        assert_eq!(
            found(&on(&["host:1", "GPU-a"], 1)),
            ["devices of model a: host:0, host:1 -> host:1, GPU-a"]
        );
        let elsewhere = "not applied until the supervisor restarts: device of model a \
                         [\"host:0\", \"host:1\"] -> \"GPU-a\"";
        assert_eq!(found(&on(&["GPU-a"], 1)), [elsewhere]);
        let mut other_file = on(&["host:0"], 1);
        other_file[0].path = "/other.gguf".into();
        assert_eq!(found(&other_file).len(), 2, "path and device");
    }

    fn models() -> impl Strategy<Value = Vec<ModelSpec>> {
        let one = |name: &'static str| {
            (0..3u32, 0..3u32, proptest::option::of(10..12u64)).prop_map(move |(workers, threads, idle)| {
                let idle_unload = idle.map(Duration::from_secs);
                ModelSpec { idle_unload, ..model(name, workers, &format!("threads = {threads}")) }
            })
        };
        let some = |name| proptest::option::of(one(name));
        (some("a"), some("b"), some("c")).prop_map(|(a, b, c)| [a, b, c].into_iter().flatten().collect())
    }

    /// What a fleet has after the changes.
    fn applied(mut running: Vec<ModelSpec>, changes: Vec<SpecChange>) -> Vec<ModelSpec> {
        for change in changes {
            let of = |name: &str| running.iter().position(|model| model.name == name).unwrap();
            match change {
                SpecChange::ModelRemoved { name } => drop(running.remove(of(&name))),
                SpecChange::ModelAdded { spec } => running.push(spec),
                SpecChange::WorkerCount { model, devices: 1, from, to } => {
                    let at = of(&model);
                    assert_eq!(running[at].workers, from);
                    running[at].workers = to;
                }
                SpecChange::WorkerSettings { model, copies, .. } => {
                    let at = of(&model);
                    running[at].copies = copies;
                }
                SpecChange::IdleUnload { model, from, to, .. } => {
                    let at = of(&model);
                    assert_eq!(running[at].idle_unload, from);
                    running[at].idle_unload = to;
                }
                SpecChange::WorkerCount { .. }
                | SpecChange::ModelDevices { .. }
                | SpecChange::FileReplaced { .. }
                | SpecChange::RouterSettings { .. }
                | SpecChange::NotApplied { .. } => unreachable!(),
            }
        }
        running.sort_by(|a, b| a.name.cmp(&b.name));
        running
    }

    proptest! {
        #[test]
        fn applied_changes_make_the_wanted_fleet_and_leave_nothing_to_change(
            running in models(), wanted in models(),
        ) {
            let router = Table::new();
            let compared = |models| ComparedSpec { router: &router, models };
            let changes = diff_specs(compared(&running), compared(&wanted));
            let after = applied(running.clone(), changes);
            prop_assert_eq!(&after, &wanted);
            prop_assert_eq!(diff_specs(compared(&after), compared(&wanted)), []);
        }
    }
}
