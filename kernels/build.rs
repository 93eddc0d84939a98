//! Compiles kernels/cuda/*.cu with nvcc, one image per file, when the feature `cuda` is on; otherwise does nothing.
//!
//! nvcc comes from CUDA_HOME, PATH or scripts/cuda-toolkit. BALLAST_CUDA_ARCHS lists what an image holds: `sm_90a` is
//! machine code, `compute_90` is PTX that newer drivers compile at load. The default is what the development machines
//! need; a release sets "sm_80,sm_90a,sm_100,sm_120,compute_120".

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

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
    let image = out.join(stem).with_extension("fatbin");
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
    let output = command
        .arg("-o")
        .arg(image)
        .arg(source)
        .output()
        .map_err(|error| format!("{} cannot be started: {error}", nvcc.display()))?;
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
