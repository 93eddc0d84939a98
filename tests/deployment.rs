// SPDX-License-Identifier: Apache-2.0

//! `deploy/` without a running systemd: units are valid and expose little, examples are
//! configurations, and `scripts/uninstall` removes what `scripts/install` writes.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use toml::{Table, Value};

use crate::harness::{ballast, demo_7m, executable, in_tree, text};

/// Ten times the highest allowed exposure.
const EXPOSURE_MAX: &str = "--threshold=20";

fn files(folder: &Path, extensions: &[&str]) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let is_wanted = |path: &PathBuf| {
        path.extension().and_then(|end| end.to_str()).is_some_and(|end| extensions.contains(&end))
    };
    let mut found: Vec<PathBuf> = entries.filter(is_wanted).collect();
    found.sort();
    assert!(!found.is_empty(), "no {extensions:?} in {}", folder.display());
    found
}

#[test]
fn units_are_valid_and_expose_little() {
    let analyze = |arguments: &[&str]| Command::new("systemd-analyze").args(arguments).output();
    if analyze(&["--version"]).is_err() {
        crate::harness::report_skipped(format_args!("systemd-analyze is not installed"));
        return;
    }
    let folder = in_tree("deploy/systemd");
    for service in files(&folder, &["service"]) {
        let security =
            analyze(&["security", "--offline=true", EXPOSURE_MAX, service.to_str().unwrap()]).unwrap();
        assert!(security.status.success(), "{}: {}", service.display(), text(&security).0);
    }
    let units = files(&folder, &["service", "socket", "slice", "target"]);
    let units = units.iter().map(|unit| unit.to_str().unwrap().replace("@.", "@0."));
    let verified: Vec<String> = ["verify".to_owned()].into_iter().chain(units).collect();
    let verified = Command::new("systemd-analyze").args(verified).output().unwrap();
    // Unknown keys are only warnings with status 0. The executable is not installed here.
    let warnings = text(&verified).1;
    let unexpected: Vec<&str> =
        warnings.lines().filter(|line| !line.contains("/usr/bin/ballast is not executable")).collect();
    assert_eq!(unexpected, Vec::<&str>::new());
}

/// A copy of an example for a machine without GPUs and without its model files.
fn on_host(example: &Path, folder: &Path) -> PathBuf {
    let mut table: Table = std::fs::read_to_string(example).unwrap().parse().unwrap();
    for model in table["models"].as_array_mut().unwrap() {
        let model = model.as_table_mut().unwrap();
        let name = Path::new(model["path"].as_str().unwrap()).file_name().unwrap().to_owned();
        let link = folder.join(name);
        if !link.exists() {
            std::os::unix::fs::symlink(demo_7m(), &link).unwrap();
        }
        model.insert("path".to_owned(), Value::String(link.to_str().unwrap().to_owned()));
        model.insert("device".to_owned(), Value::String("host".to_owned()));
        // The demo model keeps 1,024 tokens.
        model.insert("kv-bytes".to_owned(), Value::String("1MiB".to_owned()));
    }
    if let Some(access) = table.get_mut("access").and_then(Value::as_table_mut) {
        let keys = folder.join("keys.toml");
        let made = ballast().args(["key", "team-a", "--file"]).arg(&keys).output().unwrap();
        assert!(made.status.success(), "{}", text(&made).1);
        access.insert("keys".to_owned(), Value::String(keys.to_str().unwrap().to_owned()));
    }
    let copy = folder.join("ballast.toml");
    std::fs::write(&copy, table.to_string()).unwrap();
    copy
}

fn plan(config: &Path) -> Output {
    ballast().args(["plan", "--config"]).arg(config).output().unwrap()
}

#[test]
fn examples_are_fleets_that_can_be_planned() {
    for example in files(&in_tree("deploy/examples"), &["toml"]) {
        let folder = tempfile::tempdir().unwrap();
        let planned = plan(&on_host(&example, folder.path()));
        assert!(planned.status.success(), "{}: {}", example.display(), text(&planned).1);
        // As it stands, all keys are right, and this machine lacks the files that it names.
        let stderr = text(&plan(&example)).1;
        assert!(stderr.contains("No such file or directory"), "{}: {stderr}", example.display());
    }
}

#[test]
fn examples_of_single_processes_are_read_by_these_processes() {
    // They stop at the first thing that this machine lacks: a user, or a directory.
    for (process, example, lacking) in [
        ("weight-server", "weight-server.toml", "ballast-worker"),
        ("worker", "worker-0.toml", "ballast-router"),
        ("router", "router.toml", "/run/ballast-workers"),
    ] {
        let example = in_tree("deploy/examples/split").join(example);
        let output = ballast().arg(process).arg("--config").arg(&example).output().unwrap();
        let stderr = text(&output).1;
        assert!(!output.status.success() && stderr.contains(lacking), "{process}: {stderr}");
        assert!(!stderr.contains("unknown field") && !stderr.contains("missing field"), "{stderr}");
    }
}

fn script(name: &str, arguments: &[&std::ffi::OsStr], root: &Path) -> String {
    let mut command = Command::new(in_tree("scripts").join(name));
    let output = command.args(arguments).env("DESTDIR", root).env("PREFIX", "/opt/b").output().unwrap();
    assert!(output.status.success(), "{}", text(&output).1);
    text(&output).0
}

fn installed(root: &Path) -> BTreeSet<String> {
    let output = Command::new("find").arg(root).args(["-type", "f", "-printf", "%P\n"]).output().unwrap();
    text(&output).0.lines().map(str::to_owned).collect()
}

#[test]
fn installed_files_are_removed_again_but_for_the_configuration() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let executable = executable();
    let printed = script("install", &["--dry-run".as_ref(), executable.as_os_str()], root);
    assert!(printed.contains("opt/b/lib/systemd/system/ballast-worker@.service"), "{printed}");
    assert_eq!(installed(root), BTreeSet::new(), "a dry run writes nothing");

    script("install", &[executable.as_os_str()], root);
    let first = installed(root);
    for expected in [
        "etc/ballast/ballast.toml",
        "opt/b/bin/ballast",
        "opt/b/lib/systemd/system/ballast.service",
        "opt/b/lib/systemd/system/ballast-router.socket",
        "opt/b/lib/sysusers.d/ballast.conf",
        "opt/b/lib/tmpfiles.d/ballast.conf",
        "opt/b/share/bash-completion/completions/ballast",
        "opt/b/share/doc/ballast/OPERATING.md",
        "opt/b/share/man/man1/ballast-serve.1",
        "opt/b/share/doc/ballast/examples/split/router.toml",
    ] {
        assert!(first.contains(expected), "{expected} is not in {first:?}");
    }
    for unit in first.iter().filter(|file| file.contains("systemd/system")) {
        let unit = std::fs::read_to_string(root.join(unit)).unwrap();
        assert!(!unit.contains("/usr/"), "a path of another installation: {unit}");
    }

    let configuration = root.join("etc/ballast/ballast.toml");
    std::fs::write(&configuration, "# mine").unwrap();
    script("install", &[executable.as_os_str()], root);
    assert_eq!(installed(root), first, "an update writes the same files");
    assert_eq!(std::fs::read_to_string(&configuration).unwrap(), "# mine", "an update keeps it");

    script("uninstall", &["--dry-run".as_ref()], root);
    assert_eq!(installed(root), first);
    for _ in 0..2 {
        script("uninstall", &[], root);
        assert_eq!(installed(root), BTreeSet::from(["etc/ballast/ballast.toml".to_owned()]));
    }
}

/// The files of the .deb, as `cargo deb` reads them from the manifest. `made` is what
/// `scripts/package` writes to `target/package`.
fn packaged(made: &Path) -> BTreeSet<String> {
    let manifest: Table = std::fs::read_to_string(in_tree("cli/Cargo.toml")).unwrap().parse().unwrap();
    let assets = manifest["package"]["metadata"]["deb"]["assets"].as_array().unwrap().clone();
    let place = |asset: Value| {
        let text = |index: usize| asset[index].as_str().unwrap().to_owned();
        let source = match text(0).strip_prefix("../target/package/") {
            Some(name) => made.join(name),
            None => in_tree("cli").join(text(0)),
        };
        let target = text(1);
        let pattern = source.file_name().unwrap().to_str().unwrap().to_owned();
        let names = match pattern.strip_prefix("*.") {
            Some(extension) => files(source.parent().unwrap(), &[extension]),
            // cargo-deb replaces this prefix.
            None if text(0).starts_with("target/release/") => vec![source],
            None => {
                assert!(source.exists(), "{} is missing", source.display());
                vec![source]
            }
        };
        let is_folder = target.ends_with('/');
        let named = move |file: PathBuf| match is_folder {
            true => format!("{target}{}", file.file_name().unwrap().to_str().unwrap()),
            false => target.clone(),
        };
        names.into_iter().map(named).collect::<Vec<_>>()
    };
    assets.into_iter().flat_map(place).collect()
}

/// The place of an installed file in the package. Debian's zsh looks elsewhere below `/usr`.
fn in_package(file: &str) -> String {
    file.replace("opt/b/", "usr/").replace("zsh/site-functions", "zsh/vendor-completions")
}

#[test]
fn package_has_the_files_of_an_installation() {
    let root = tempfile::tempdir().unwrap();
    script("install", &[executable().as_os_str()], root.path());
    let expected: BTreeSet<String> =
        installed(root.path()).into_iter().map(|file| in_package(&file)).collect();
    let made = tempfile::tempdir().unwrap();
    script("shell-files", &[executable().as_os_str(), made.path().as_os_str()], root.path());
    assert_eq!(packaged(made.path()), expected);
}
