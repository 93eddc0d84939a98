// SPDX-License-Identifier: Apache-2.0

//! If the feature `cuda` is on, compiles kernels/cuda/*.cu with nvcc, one image per file.
//!
//! nvcc comes from CUDA_HOME, PATH or scripts/cuda-toolkit. BALLAST_CUDA_ARCHS lists the contents
//! of an image: `sm_90a` is machine code, `compute_90` is PTX that newer drivers compile when they
//! load it. The default is what the development machines need. A release sets
//! what kernels/release-archs has. Bulk copies need at least 9.0.
//!
//! With BALLAST_CUDA_DELAYS=1, warps wait for random times where kernels overlap
//! (cuda/stream_order.cuh), so that tests find what one of them reads too early.
//!
//! Before nvcc runs, build.rs writes the tables of src/cuda/abi as headers to $OUT_DIR/abi.
//! Afterwards it lists the kernels of each image in $OUT_DIR/compiled_kernels.rs. With this list
//! the crate refuses to launch a kernel that does not exist.
//!
//! Cargo runs this script anew for clippy, for tests and for each profile. So images are kept in
//! target/cuda-images, under a hash of all that they depend on: nvcc, its arguments and the source
//! with what it includes. An image has two files: `x-HASH.fatbin`, and `x-HASH.kernels`, the names
//! that ptxas compiled, which is written last.

#[path = "src/cuda/abi/mod.rs"]
mod abi;

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::SystemTime;

const DEFAULT_ARCHS: &str = "sm_90a";
/// The text before a kernel's name in the output of `ptxas -v`: "Compiling entry function
/// 'rms_norm' for 'sm_90a'".
const COMPILED_KERNEL: &str = "Compiling entry function '";
/// Where images are kept, seen from this crate. scripts/cuda-toolkit installs into the same folder.
const KEPT_IMAGES: &str = "../target/cuda-images";
/// Images kept of one source: of some branches and lists of architectures.
const KEPT_MAX: usize = 6;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    for name in ["BALLAST_CUDA_ARCHS", "BALLAST_CUDA_DELAYS", "CUDA_HOME"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    println!("cargo:rerun-if-changed=cuda");
    println!("cargo:rerun-if-changed=src/cuda/abi");
    if let Err(problem) = compile_all() {
        // Cargo prints the output of a build script that failed.
        eprintln!("{problem}");
        std::process::exit(1);
    }
}

struct Compiler {
    nvcc: PathBuf,
    /// The values of `-gencode`.
    targets: Vec<String>,
    has_delays: bool,
    out: PathBuf,
}

fn compile_all() -> Result<(), String> {
    let archs = std::env::var("BALLAST_CUDA_ARCHS").unwrap_or_else(|_| DEFAULT_ARCHS.to_owned());
    let targets: Vec<String> = archs.split(',').map(|arch| gencode(arch.trim())).collect::<Result<_, _>>()?;
    println!("cargo:rustc-env=BALLAST_CUDA_ARCHS={archs}");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    write_headers(&out.join("abi"))?;
    let has_delays = match std::env::var("BALLAST_CUDA_DELAYS").as_deref() {
        Err(std::env::VarError::NotPresent) => false,
        Ok("1") => true,
        other => return Err(format!("BALLAST_CUDA_DELAYS: expected 1, found {other:?}")),
    };
    let compiler = Compiler { nvcc: find_nvcc()?, targets, has_delays, out };
    let mut sources: Vec<PathBuf> = std::fs::read_dir("cuda")
        .map_err(|error| format!("kernels/cuda cannot be listed: {error}"))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "cu"))
        .collect();
    sources.sort();
    let queue = Mutex::new(sources.clone());
    let next = || queue.lock().ok()?.pop();
    let jobs = std::env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse().ok()).unwrap_or(1);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..jobs)
            .map(|_| {
                scope.spawn(|| {
                    while let Some(source) = next() {
                        compiler.compile(&source)?;
                    }
                    Ok::<(), String>(())
                })
            })
            .collect();
        workers
            .into_iter()
            .try_for_each(|worker| worker.join().map_err(|_| "a compile thread panicked".to_owned())?)
    })?;
    write_kernel_names(&compiler.out, &sources)
}

/// Writes the tables of src/cuda/abi as headers.
fn write_headers(folder: &Path) -> Result<(), String> {
    let failed = |error| format!("{} cannot be written: {error}", folder.display());
    std::fs::create_dir_all(folder).map_err(failed)?;
    for header in &abi::HEADERS {
        std::fs::write(folder.join(header.file), header.to_cuda()).map_err(failed)?;
    }
    Ok(())
}

/// Writes the list of the kernels of each image. For an image without machine code (PTX alone), the
/// list is empty, because nvcc does not print names.
fn write_kernel_names(out: &Path, sources: &[PathBuf]) -> Result<(), String> {
    let mut text = String::from("const COMPILED_KERNELS: &[(&str, &[&str])] = &[\n");
    for source in sources {
        let stem = source.file_stem().ok_or("a source without a name")?;
        let path = out.join(stem).with_extension("kernels");
        let names = std::fs::read_to_string(&path)
            .map_err(|error| format!("{} cannot be read: {error}", path.display()))?;
        let names: Vec<&str> = names.lines().collect();
        text += &format!("    ({:?}, &{names:?}),\n", stem.to_string_lossy());
    }
    text += "];\n";
    std::fs::write(out.join("compiled_kernels.rs"), text)
        .map_err(|error| format!("compiled_kernels.rs cannot be written: {error}"))
}

fn gencode(arch: &str) -> Result<String, String> {
    match arch.split_once('_') {
        Some(("sm", version)) => Ok(format!("arch=compute_{version},code=sm_{version}")),
        Some(("compute", version)) => Ok(format!("arch=compute_{version},code=compute_{version}")),
        _ => Err(format!("BALLAST_CUDA_ARCHS: {arch:?} is neither sm_<version> nor compute_<version>")),
    }
}

impl Compiler {
    /// Puts the image of one source into $OUT_DIR, compiled now or kept from an earlier build.
    fn compile(&self, source: &Path) -> Result<(), String> {
        let stem = source.file_stem().ok_or("a source without a name")?.to_string_lossy().into_owned();
        let kept = Path::new(KEPT_IMAGES).join(format!("{stem}-{:016x}", self.hash(source)?));
        let (image, names) = (kept.with_extension("fatbin"), kept.with_extension("kernels"));
        if !names.exists() {
            self.run_nvcc(source, &image, &names)?;
            forget_old_images(&stem)?;
        }
        let output = self.out.join(&stem);
        for (from, extension) in [(image, "fatbin"), (names, "kernels")] {
            let to = output.with_extension(extension);
            std::fs::copy(&from, &to).map_err(|error| {
                format!("{} cannot be copied to {}: {error}", from.display(), to.display())
            })?;
        }
        Ok(())
    }

    /// With `--fmad=false`, nvcc fuses an addition with a product only where the source says fmaf.
    /// So every kernel rounds in the same way.
    fn arguments(&self) -> Vec<&str> {
        let mut arguments = vec![
            "-fatbin",
            "-std=c++17",
            "-O3",
            "--fmad=false",
            "-Werror",
            "all-warnings",
            "--compress-mode=size",
            "-Xptxas=-v",
            "-Icuda",
        ];
        arguments.extend(self.targets.iter().flat_map(|target| ["-gencode", target]));
        arguments.extend(self.has_delays.then_some("-DBALLAST_DELAYS"));
        arguments
    }

    /// Other processes may compile the same image: each writes files of its own and renames them.
    fn run_nvcc(&self, source: &Path, image: &Path, names: &Path) -> Result<(), String> {
        std::fs::create_dir_all(KEPT_IMAGES)
            .map_err(|error| format!("{KEPT_IMAGES} cannot be made: {error}"))?;
        let partial = |path: &Path| path.with_extension(format!("{}.partial", std::process::id()));
        let mut command = Command::new(&self.nvcc);
        command.args(self.arguments()).arg("-I").arg(&self.out);
        let output = command
            .arg("-o")
            .arg(partial(image))
            .arg(source)
            .output()
            .map_err(|error| format!("{} cannot be started: {error}", self.nvcc.display()))?;
        let printed = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        if !output.status.success() {
            return Err(format!("nvcc failed on {}:\n{}", source.display(), printed.concat()));
        }
        let failed = |path: &Path, error| format!("{} cannot be written: {error}", path.display());
        std::fs::rename(partial(image), image).map_err(|error| failed(image, error))?;
        std::fs::write(partial(names), compiled_kernels(&printed.concat()))
            .and_then(|()| std::fs::rename(partial(names), names))
            .map_err(|error| failed(names, error))
    }

    /// A hash of nvcc, its arguments and the texts of the source and of all that it includes.
    fn hash(&self, source: &Path) -> Result<u64, String> {
        let failed = |path: &Path, error| format!("{} cannot be read: {error}", path.display());
        let nvcc = self.nvcc.metadata().and_then(|nvcc| Ok((nvcc.len(), nvcc.modified()?)));
        let mut hasher = DefaultHasher::new();
        nvcc.map_err(|error| failed(&self.nvcc, error))?.hash(&mut hasher);
        self.arguments().hash(&mut hasher);
        let mut texts = BTreeMap::new();
        let mut open = vec![source.to_owned()];
        while let Some(path) = open.pop() {
            let text = std::fs::read_to_string(&path).map_err(|error| failed(&path, error))?;
            for name in text.lines().filter_map(included_name) {
                let places = [path.parent().unwrap_or(Path::new("")), Path::new("cuda"), &self.out];
                let found = places.iter().map(|place| place.join(name)).find(|path| path.exists());
                let found =
                    found.ok_or_else(|| format!("{} includes {name}, which is nowhere", path.display()))?;
                let found = found.canonicalize().map_err(|error| failed(&found, error))?;
                if !texts.contains_key(&found) {
                    texts.insert(found.clone(), String::new());
                    open.push(found);
                }
            }
            texts.insert(path, text);
        }
        // Without paths: those of generated headers differ from build to build.
        let mut texts: Vec<String> = texts.into_values().collect();
        texts.sort();
        texts.hash(&mut hasher);
        Ok(hasher.finish())
    }
}

/// The name in `#include "name"`.
fn included_name(line: &str) -> Option<&str> {
    line.trim_start().strip_prefix("#include \"")?.split('"').next()
}

/// Deletes all but the newest images of a source.
fn forget_old_images(stem: &str) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("{KEPT_IMAGES} cannot be tidied: {error}");
    let mut images: Vec<(SystemTime, PathBuf)> = Vec::new();
    for entry in std::fs::read_dir(KEPT_IMAGES).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let is_names = name.ends_with(".kernels");
        if is_names && name.rsplit_once('-').is_some_and(|(source, _)| source == stem) {
            // Another build may delete the same image.
            let Ok(changed) = path.metadata().and_then(|names| names.modified()) else { continue };
            images.push((changed, path));
        }
    }
    images.sort();
    for (_, names) in images.iter().rev().skip(KEPT_MAX) {
        for path in [names.clone(), names.with_extension("fatbin")] {
            match std::fs::remove_file(path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(failed(error)),
                _ => {}
            }
        }
    }
    Ok(())
}

/// Returns the kernels that `ptxas -v` named, one per line.
fn compiled_kernels(printed: &str) -> String {
    let named = |line: &str| Some(line.split_once(COMPILED_KERNEL)?.1.split_once('\'')?.0.to_owned());
    let mut names: Vec<String> = printed.lines().filter_map(named).collect();
    names.sort();
    // ptxas names a kernel once per architecture.
    names.dedup();
    names.join("\n")
}

fn find_nvcc() -> Result<PathBuf, String> {
    let output = Command::new("../scripts/cuda-toolkit")
        .output()
        .map_err(|error| format!("scripts/cuda-toolkit cannot be started: {error}"))?;
    if !output.status.success() {
        return Err(format!(
            "no CUDA toolkit: set CUDA_HOME, or have nvcc in PATH\n{}",
            String::from_utf8_lossy(&output.stderr)
        ));
    }
    Ok(Path::new(String::from_utf8_lossy(&output.stdout).trim()).join("bin/nvcc"))
}
