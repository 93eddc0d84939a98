//! Compiles kernels/cuda/*.cu with nvcc, one image per file, when the feature `cuda` is on; otherwise does nothing.
//!
//! nvcc comes from CUDA_HOME, PATH or scripts/cuda-toolkit. BALLAST_CUDA_ARCHS lists what an image holds: `sm_90a` is
//! machine code, `compute_90` is PTX that newer drivers compile at load. The default is what the development machines
//! need; a release sets "sm_90a,sm_100,sm_120,compute_120". Bulk copies make 9.0 the least.
//!
//! An image is made again only if the command that makes it, or a file that nvcc read for it, has changed since: beside
//! `x.fatbin` stand `x.command`, written when its compilation began, and `x.d`, the files that nvcc read.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::SystemTime;

const DEFAULT_ARCHS: &str = "sm_90a";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    for name in ["BALLAST_CUDA_ARCHS", "CUDA_HOME"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    println!("cargo:rerun-if-changed=cuda");
    if let Err(problem) = compile_all() {
        // Cargo shows what a failed build script printed.
        eprintln!("{problem}");
        std::process::exit(1);
    }
}

fn compile_all() -> Result<(), String> {
    let archs = std::env::var("BALLAST_CUDA_ARCHS").unwrap_or_else(|_| DEFAULT_ARCHS.to_owned());
    let targets: Vec<String> = archs.split(',').map(|arch| gencode(arch.trim())).collect::<Result<_, _>>()?;
    println!("cargo:rustc-env=BALLAST_CUDA_ARCHS={archs}");
    let nvcc = nvcc()?;
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    let mut sources: Vec<PathBuf> = std::fs::read_dir("cuda")
        .map_err(|error| format!("kernels/cuda cannot be listed: {error}"))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "cu"))
        .collect();
    sources.sort();
    let queue = Mutex::new(sources);
    let next = || queue.lock().ok()?.pop();
    let jobs = std::env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse().ok()).unwrap_or(1);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..jobs)
            .map(|_| {
                scope.spawn(|| {
                    while let Some(source) = next() {
                        compile(&nvcc, &targets, &source, &out)?;
                    }
                    Ok(())
                })
            })
            .collect();
        workers
            .into_iter()
            .try_for_each(|worker| worker.join().map_err(|_| "a compile thread panicked".to_owned())?)
    })
}

fn gencode(arch: &str) -> Result<String, String> {
    match arch.split_once('_') {
        Some(("sm", version)) => Ok(format!("arch=compute_{version},code=sm_{version}")),
        Some(("compute", version)) => Ok(format!("arch=compute_{version},code=compute_{version}")),
        _ => Err(format!("BALLAST_CUDA_ARCHS: {arch:?} is neither sm_<version> nor compute_<version>")),
    }
}

/// `--fmad=false`: an addition is fused with a product only where the source says fmaf, so that every kernel rounds alike.
fn compile(nvcc: &Path, targets: &[String], source: &Path, out: &Path) -> Result<(), String> {
    let stem = source.file_stem().ok_or("a source without a name")?;
    let made = |extension: &str| out.join(stem).with_extension(extension);
    let (image, dependencies, record) = (made("fatbin"), made("d"), made("command"));
    let mut command = Command::new(nvcc);
    command.args([
        "-fatbin",
        "-std=c++17",
        "-O3",
        "--fmad=false",
        "-Werror",
        "all-warnings",
        "--compress-mode=size",
    ]);
    for target in targets {
        command.args(["-gencode", target]);
    }
    command.arg("-MD").arg("-MF").arg(&dependencies).arg("-o").arg(&image).arg(source);
    let wanted = format!("{command:?}");
    if std::fs::read_to_string(&record).is_ok_and(|made| made == wanted)
        && is_current(&image, &dependencies, &record).unwrap_or(false)
    {
        return Ok(());
    }
    let failed = |path: &Path, error| format!("{} cannot be replaced: {error}", path.display());
    match std::fs::remove_file(&image) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(failed(&image, error)),
        _ => std::fs::write(&record, &wanted).map_err(|error| failed(&record, error))?,
    }
    let output =
        command.output().map_err(|error| format!("{} cannot be started: {error}", nvcc.display()))?;
    if !output.status.success() {
        return Err(format!(
            "nvcc failed on {}:\n{}{}",
            source.display(),
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        ));
    }
    Ok(())
}

/// Whether the image is there and nothing that it was made of is younger than the record of its making.
fn is_current(image: &Path, dependencies: &Path, record: &Path) -> std::io::Result<bool> {
    let changed = |path: &Path| -> std::io::Result<SystemTime> { path.metadata()?.modified() };
    let began = changed(record)?;
    // As make reads it: `target: file file \`, and a space in a name has a backslash before it.
    let text = std::fs::read_to_string(dependencies)?.replace("\\\n", " ").replace("\\ ", "\0");
    let Some((_, files)) = text.split_once(": ") else { return Ok(false) };
    for file in files.split_whitespace() {
        if changed(Path::new(&file.replace('\0', " ")))? >= began {
            return Ok(false);
        }
    }
    image.try_exists()
}

fn nvcc() -> Result<PathBuf, String> {
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
