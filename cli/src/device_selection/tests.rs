// SPDX-License-Identifier: Apache-2.0

use super::*;

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Table {
    device: DeviceSelection,
}

fn parsed(value: &str) -> Result<DeviceSelection, String> {
    toml::from_str(&format!("device = {value}"))
        .map(|table: Table| table.device)
        .map_err(|error| error.message().to_owned())
}

fn devices(value: &str, seen: &GpuInventory, without_kernel: Option<&str>) -> Vec<String> {
    let choices = parsed(value).unwrap().choose("m", seen, without_kernel).unwrap();
    choices.iter().map(DeviceChoice::to_string).collect()
}

#[test]
fn a_selection_is_written_as_it_is_read() {
    for value in ["\"auto\"", "\"all\"", "\"host:1\"", "[\"host:0\", \"host:1\"]", "[\"host\", \"cuda:3\"]"] {
        let table = Table { device: parsed(value).unwrap() };
        assert_eq!(toml::to_string(&table).unwrap(), format!("device = {value}\n"));
        let argument = table.device.to_string();
        assert_eq!(argument.parse::<DeviceSelection>().unwrap(), table.device);
    }
    assert_eq!(parsed("[\"cuda:1\"]"), parsed("\"cuda:1\""), "a list of one device");
}

#[test]
fn a_wrong_list_is_refused_and_the_key_is_named() {
    for (value, part) in [
        ("[]", "`device` is an empty list"),
        ("[\"cuda:0\", \"cuda:0\"]", "`device` names cuda:0 twice"),
        ("[\"host\", \"auto\"]", "\"auto\" chooses devices itself"),
        ("[\"all\", \"host\"]", "\"all\" chooses devices itself"),
        ("[\"host\", \"gpu0\"]", "`device`: \"gpu0\" is not a device"),
        ("7", "`device` must be a string, or an array of strings"),
    ] {
        let error = parsed(value).unwrap_err();
        assert!(error.contains(part), "{value}: {error}");
    }
}

#[test]
fn all_means_every_usable_gpu_and_never_the_host() {
    let seen = GpuInventory {
        gpus: vec![GpuInfo::h200(0), GpuInfo::without_kernels(1), GpuInfo::h200(2)],
        problem: None,
    };
    let chosen = devices("\"all\"", &seen, None);
    assert_eq!(chosen.len(), 2);
    assert!(chosen[1].starts_with("cuda:2 NVIDIA H200"), "{chosen:?}");
    assert!(chosen[1].ends_with("(one of 2 usable GPUs among 3)"), "{chosen:?}");
    let refused = |seen: &GpuInventory, without_kernel: Option<&str>| {
        let failure = parsed("\"all\"").unwrap().choose("m", seen, without_kernel).unwrap_err();
        (failure.exit, failure.message().to_owned())
    };
    let text = |why: &str| {
        format!(
            "`device` of model \"m\": \"all\" means every GPU, and none can be used: {why}; \
             `device = \"auto\"` uses the host then"
        )
    };
    assert_eq!(refused(&seen, Some("no kernel")), (Exit::ModelRefused, text("no kernel")));
    let none = GpuInventory::default();
    assert_eq!(refused(&none, None), (Exit::Usage, text("this process sees no GPU")));
}

#[test]
fn a_gpu_that_is_named_twice_in_two_ways_is_refused() {
    let seen = GpuInventory { gpus: vec![GpuInfo::h200(0)], problem: None };
    let value = format!("[\"cuda:0\", {:?}]", GpuInfo::h200(0).uuid);
    let failure = parsed(&value).unwrap().choose("m", &seen, None).unwrap_err();
    assert!(failure.message().starts_with("`device` of model \"m\": GPU-"), "{}", failure.message());
    let failure = parsed("[\"host\", \"cuda:7\"]").unwrap().choose("m", &seen, None).unwrap_err();
    assert!(
        failure.message().contains("`device` of model \"m\": cuda:7 cannot be used"),
        "{}",
        failure.message()
    );
    assert_eq!(devices("[\"host:1\", \"host:0\"]", &seen, None), ["host:1", "host:0"]);
}
