// SPDX-License-Identifier: Apache-2.0

//! `[models-directory]` in `ballast.toml`: every model file of a directory is a model of the fleet,
//! which its first request loads. docs/decisions/0053-models-directory.md has the reasons.

use std::collections::BTreeSet;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::cli_error::{CliResult, IoContext};
use crate::device_selection::DeviceSelection;
use crate::fleet_config::FleetConfig;
use crate::model_config::{FleetModelConfig, check_idle_unload};

/// Publishers and repositories are two levels of folders, files of a split model a third one.
const DEPTH_MAX: usize = 3;
/// More files than a fleet can have models. A directory with more is probably the wrong one.
const FILES_MAX: usize = 1024;
/// How often the directory is read. Files on a network mount send no events.
const SCAN_PERIOD: Duration = Duration::from_secs(5);
const IDLE_UNLOAD: Duration = Duration::from_secs(600);

/// The directory, and the settings of each of its models.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct ModelsDirectoryConfig {
    pub(crate) path: PathBuf,
    /// As in `[[models]]`.
    #[serde(default)]
    pub(crate) device: DeviceSelection,
    #[serde(default = "one_worker")]
    workers: u32,
    ctx_size: Option<u32>,
    #[serde(default = "idle_unload", with = "service::duration")]
    idle_unload: Duration,
}

fn one_worker() -> u32 {
    1
}

fn idle_unload() -> Duration {
    IDLE_UNLOAD
}

/// A model file, or a part of one, with what changes when it does.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FoundFile {
    path: PathBuf,
    /// Device and inode.
    id: (u64, u64),
    bytes: u64,
    modified: SystemTime,
}

impl ModelsDirectoryConfig {
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.workers == 0 {
            return Err("`models-directory.workers` is 0, it must be at least 1".to_owned());
        }
        check_idle_unload(self.idle_unload).map_err(|why| format!("`models-directory.idle-unload`: {why}"))
    }

    /// The model files of the directory and of the folders in it, the higher ones first. A file
    /// with several links is found once.
    pub(crate) fn scan(&self) -> CliResult<Vec<FoundFile>> {
        let mut found = Vec::new();
        scan_folder(&self.path, DEPTH_MAX, &mut found)
            .with_context(|| format!("cannot read the models directory {}", self.path.display()))?;
        found.sort_unstable_by_key(|file| (file.path.components().count(), file.path.clone()));
        let mut seen = BTreeSet::new();
        found.retain(|file| seen.insert(file.id));
        Ok(found)
    }
}

/// Folders inside that cannot be read are left out.
fn scan_folder(folder: &Path, depth: usize, found: &mut Vec<FoundFile>) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let is_hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        // A link to nothing, or a file that has just been removed.
        let Some(metadata) = std::fs::metadata(&path).ok().filter(|_| !is_hidden) else { continue };
        if metadata.is_dir() && depth > 1 {
            if let Err(error) = scan_folder(&path, depth - 1, found) {
                tracing::warn!(folder = %path.display(), %error, "cannot read a folder of the models directory");
            }
        } else if metadata.is_file() && is_model_file(&path) {
            if found.len() >= FILES_MAX {
                return Err(io::Error::other(format!("it has more than {FILES_MAX} model files")));
            }
            let modified = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            let id = (metadata.dev(), metadata.ino());
            found.push(FoundFile { path, id, bytes: metadata.len(), modified });
        }
    }
    Ok(())
}

fn is_model_file(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

/// The name of the model in a file: the file's without its extension, and without the number of
/// the part. None for the further parts of a split model, for projectors of images, which are no
/// models, and for names that are not UTF-8.
fn model_name(path: &Path) -> Option<&str> {
    let stem = path.file_stem()?.to_str()?;
    if stem.starts_with("mmproj") {
        return None;
    }
    let Some((name, part)) = split_part(stem) else { return Some(stem) };
    (part == 1).then_some(name)
}

/// "m-00002-of-00003" is part 2 of "m".
fn split_part(stem: &str) -> Option<(&str, u32)> {
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (name, part) = rest.rsplit_once('-')?;
    let is_number = |digits: &str| digits.len() == 5 && digits.bytes().all(|byte| byte.is_ascii_digit());
    (is_number(part) && is_number(count)).then(|| part.parse().ok().map(|part| (name, part)))?
}

/// Reads the models directory, if there is one, and adds a model for each of its files. Returns the
/// files.
pub(crate) fn add_models(config: &mut FleetConfig) -> CliResult<Vec<FoundFile>> {
    let Some(directory) = config.models_directory.clone() else { return Ok(Vec::new()) };
    let found = directory.scan()?;
    add_found(config, &directory, &found);
    Ok(found)
}

/// A name that the configuration has already keeps its meaning, and a file that it names is no
/// further model. Of two files with one name, the first one is the model.
fn add_found(config: &mut FleetConfig, directory: &ModelsDirectoryConfig, found: &[FoundFile]) {
    let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    // A swap has not made the old file a further model.
    let configured =
        config.models.iter().flat_map(|model| [Some(&model.path), model.configured_path.as_ref()]);
    let configured: BTreeSet<PathBuf> = configured.flatten().map(|path| absolute(path)).collect();
    let names = config.models.iter().flat_map(|model| std::iter::once(&model.name).chain(&model.aliases));
    let mut taken: BTreeSet<String> = names.cloned().collect();
    for file in found.iter().filter(|file| !configured.contains(&absolute(&file.path))) {
        let Some(name) = model_name(&file.path) else { continue };
        if !taken.insert(name.to_owned()) {
            let path = file.path.display();
            tracing::warn!(name, %path, "a file of the models directory is left out: its name is taken");
            continue;
        }
        config.models.push(FleetModelConfig {
            device: directory.device.clone(),
            workers: directory.workers,
            ctx_size: directory.ctx_size,
            idle_unload: Some(directory.idle_unload),
            on_demand: true,
            is_from_directory: true,
            ..FleetModelConfig::new(name.to_owned(), file.path.clone())
        });
    }
}

/// Reads the directory again and again on a thread of its own, which a mount may hold up. The
/// value counts the changes. A change is one when two readings agree about it: until then, files
/// are being copied.
pub(crate) fn watch_directory(
    directory: ModelsDirectoryConfig,
    mut known: Vec<FoundFile>,
) -> CliResult<watch::Receiver<u64>> {
    let (changes, receiver) = watch::channel(0);
    let scan = move || {
        let mut last = known.clone();
        let mut is_readable = true;
        while !changes.is_closed() {
            std::thread::sleep(SCAN_PERIOD);
            match directory.scan() {
                Ok(found) => {
                    is_readable = true;
                    let is_stable = found == last;
                    last = found;
                    if is_stable && last != known {
                        known.clone_from(&last);
                        changes.send_modify(|count| *count += 1);
                    }
                }
                Err(failure) => {
                    // Its models stay in the fleet.
                    if std::mem::take(&mut is_readable) {
                        tracing::error!(cause = failure.message(), "the models directory is not watched");
                    }
                }
            }
        }
    };
    let started = std::thread::Builder::new().name("models-directory".to_owned()).spawn(scan);
    started.with_context(|| "cannot start a thread".to_owned())?;
    Ok(receiver)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_split_model_is_one_model_and_a_projector_is_none() {
        let name = |path: &'static str| model_name(Path::new(path));
        assert_eq!(name("/d/qwen3-8b-q4_k_m.gguf"), Some("qwen3-8b-q4_k_m"));
        assert_eq!(name("/d/big-00001-of-00003.gguf"), Some("big"));
        assert_eq!(name("/d/big-00002-of-00003.gguf"), None);
        assert_eq!(name("/d/big-1-of-3.gguf"), Some("big-1-of-3"));
        assert_eq!(name("/d/mmproj-big.gguf"), None);
    }

    #[test]
    fn folders_are_read_three_deep_and_other_files_left_out() {
        let folder = tempfile::tempdir().unwrap();
        for file in [
            "a.gguf",
            "b.GGUF",
            "notes.txt",
            ".hidden.gguf",
            "p/r/c.gguf",
            "p/r/q/deep.gguf",
            "x.gguf/d.gguf",
        ] {
            let path = folder.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }
        std::os::unix::fs::symlink("/nowhere", folder.path().join("broken.gguf")).unwrap();
        std::os::unix::fs::symlink("..", folder.path().join("p/loop")).unwrap();
        let directory: ModelsDirectoryConfig =
            toml::from_str(&format!("path = {:?}", folder.path())).unwrap();
        let found = directory.scan().unwrap();
        let relative = |file: &FoundFile| file.path.strip_prefix(folder.path()).unwrap().to_owned();
        let found: Vec<PathBuf> = found.iter().map(relative).collect();
        assert_eq!(found, ["a.gguf", "b.GGUF", "x.gguf/d.gguf", "p/r/c.gguf"].map(PathBuf::from));
        let missing = ModelsDirectoryConfig { path: folder.path().join("missing"), ..directory };
        assert!(missing.scan().unwrap_err().message().contains("missing"));
    }

    #[test]
    fn a_name_or_a_file_of_the_configuration_stays_what_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("ballast.toml");
        let text = "[models-directory]\npath = \"models\"\nworkers = 3\nidle-unload = \"1min\"\n\
                    [[models]]\nname = \"mine\"\npath = \"models/c.gguf\"\naliases = [\"b\"]\n";
        std::fs::write(&file, text).unwrap();
        let mut config = FleetConfig::load(&file, None).unwrap();
        let directory = config.models_directory.clone().unwrap();
        assert_eq!(directory.path, folder.path().join("models"));
        let found = ["a.gguf", "b.gguf", "c.gguf", "later/a.gguf"].map(|name| FoundFile {
            path: directory.path.join(name),
            id: (0, 0),
            bytes: 0,
            modified: SystemTime::UNIX_EPOCH,
        });
        add_found(&mut config, &directory, &found);
        let added: Vec<(&str, u32, bool)> = config.models[1..]
            .iter()
            .map(|model| (model.name.as_str(), model.workers, model.on_demand))
            .collect();
        assert_eq!(added, [("a", 3, true)]);
        assert_eq!(config.models[1].idle_unload, Some(Duration::from_secs(60)));
    }

    #[test]
    fn the_watch_counts_what_two_readings_agree_about() {
        let folder = tempfile::tempdir().unwrap();
        let directory: ModelsDirectoryConfig =
            toml::from_str(&format!("path = {:?}", folder.path())).unwrap();
        let mut changes = watch_directory(directory.clone(), directory.scan().unwrap()).unwrap();
        std::fs::write(folder.path().join("a.gguf"), "").unwrap();
        let began = std::time::Instant::now();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(changes.changed()).unwrap();
        assert!(began.elapsed() >= SCAN_PERIOD, "{:?}", began.elapsed());
        assert_eq!(*changes.borrow(), 1);
    }
}
