// SPDX-License-Identifier: Apache-2.0

//! If the feature `cuda` is on, compiles kernels/cuda/*.cu with nvcc, one image per file.
//!
//! nvcc comes from CUDA_HOME, PATH or scripts/cuda-toolkit. BALLAST_CUDA_ARCHS lists the contents
//! of an image: `sm_90a` is machine code, `compute_90` is PTX that newer drivers compile when they
//! load it. The default is what the development machines need. A release sets
//! "sm_90a,sm_100,sm_120,compute_120". Bulk copies need at least 9.0.
//!
//! Before nvcc runs, build.rs writes the tables of src/cuda/abi as headers to $OUT_DIR/abi.
//! Afterwards it lists the kernels of each image in $OUT_DIR/compiled_kernels.rs. With this list
//! the crate refuses to launch a kernel that does not exist.
//!
//! An image is compiled again only if its command changed, or if a file that nvcc read for it
//! changed. Four files record this: `x.fatbin`, `x.command` (written when the compilation began),
//! `x.d` (the files that nvcc read) and `x.kernels` (the names that ptxas compiled).

#[path = "src/cuda/abi/mod.rs"]
mod abi;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::SystemTime;

const DEFAULT_ARCHS: &str = "sm_90a";
/// The text before a kernel's name in the output of `ptxas -v`: "Compiling entry function
/// 'rms_norm' for 'sm_90a'".
const COMPILED_KERNEL: &str = "Compiling entry function '";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    for name in ["BALLAST_CUDA_ARCHS", "CUDA_HOME"] {
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
    out: PathBuf,
}

fn compile_all() -> Result<(), String> {
    let archs = std::env::var("BALLAST_CUDA_ARCHS").unwrap_or_else(|_| DEFAULT_ARCHS.to_owned());
    let targets: Vec<String> = archs.split(',').map(|arch| gencode(arch.trim())).collect::<Result<_, _>>()?;
    println!("cargo:rustc-env=BALLAST_CUDA_ARCHS={archs}");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    write_headers(&out.join("abi"))?;
    let compiler = Compiler { nvcc: find_nvcc()?, targets, out };
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

/// Writes the tables of src/cuda/abi as headers. A header that did not change keeps its time,
/// because a newer header would compile all images again.
fn write_headers(folder: &Path) -> Result<(), String> {
    let failed = |error| format!("{} cannot be written: {error}", folder.display());
    std::fs::create_dir_all(folder).map_err(failed)?;
    for header in &abi::HEADERS {
        let (path, text) = (folder.join(header.file), header.to_cuda());
        if std::fs::read_to_string(&path).is_ok_and(|current| current == text) {
            continue;
        }
        std::fs::write(&path, text).map_err(failed)?;
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
    /// Compiles one source. With `--fmad=false`, nvcc fuses an addition with a product only where
    /// the source says fmaf. So every kernel rounds in the same way.
    fn compile(&self, source: &Path) -> Result<(), String> {
        let stem = source.file_stem().ok_or("a source without a name")?;
        let output_path = |extension: &str| self.out.join(stem).with_extension(extension);
        let (image, dependencies, record) = (output_path("fatbin"), output_path("d"), output_path("command"));
        let mut command = Command::new(&self.nvcc);
        command.args([
            "-fatbin",
            "-std=c++17",
            "-O3",
            "--fmad=false",
            "-Werror",
            "all-warnings",
            "--compress-mode=size",
            "-Xptxas=-v",
            "-Icuda",
        ]);
        command.arg("-I").arg(&self.out);
        for target in &self.targets {
            command.args(["-gencode", target]);
        }
        command.arg("-MD").arg("-MF").arg(&dependencies).arg("-o").arg(&image).arg(source);
        let wanted = format!("{command:?}");
        if std::fs::read_to_string(&record).is_ok_and(|current| current == wanted)
            && is_current(&image, &dependencies, &record).unwrap_or(false)
            && output_path("kernels").exists()
        {
            return Ok(());
        }
        let failed = |path: &Path, error| format!("{} cannot be replaced: {error}", path.display());
        match std::fs::remove_file(&image) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(failed(&image, error)),
            _ => std::fs::write(&record, &wanted).map_err(|error| failed(&record, error))?,
        }
        let output = command
            .output()
            .map_err(|error| format!("{} cannot be started: {error}", self.nvcc.display()))?;
        let printed = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        if !output.status.success() {
            return Err(format!("nvcc failed on {}:\n{}", source.display(), printed.concat()));
        }
        let names = output_path("kernels");
        std::fs::write(&names, compiled_kernels(&printed.concat())).map_err(|error| failed(&names, error))
    }
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

/// Whether the image exists and no file that nvcc read for it is newer than its record.
fn is_current(image: &Path, dependencies: &Path, record: &Path) -> std::io::Result<bool> {
    let changed = |path: &Path| -> std::io::Result<SystemTime> { path.metadata()?.modified() };
    let began = changed(record)?;
    // The format of make: `target: file file \`. A backslash precedes a space in a name.
    let text = std::fs::read_to_string(dependencies)?.replace("\\\n", " ").replace("\\ ", "\0");
    let Some((_, files)) = text.split_once(": ") else { return Ok(false) };
    for file in files.split_whitespace() {
        if changed(Path::new(&file.replace('\0', " ")))? >= began {
            return Ok(false);
        }
    }
    image.try_exists()
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
