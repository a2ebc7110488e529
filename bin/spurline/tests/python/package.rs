//! Puts the package together, and runs its tests.

use spurline_rig::python_packages::installed_packages;
use spurline_rig::staging_group::StagingGroup;
use spurline_rig::world::*;
use spurline_testkit::S3Server;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Packages for the tests, of these releases.
const TOOLS: [&str; 3] = ["pytest==9.2.0", "numpy==2.4.6", "fsspec==2026.9.0"];

/// Libraries above fsspec, for the nightly run.
const LIBRARIES: [&str; 6] =
    ["pandas==3.1.1", "pyarrow==26.0.1", "zarr==3.1.6", "safetensors==0.8.0", "ml_dtypes==0.6.0", "webdataset==1.0.2"];

/// torch without code for GPUs, which comes from an index of its own.
const TORCH_PACKAGES: [&str; 1] = ["torch==2.15.0+cpu"];

/// The folder of the package's files.
fn package_files() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../python")
}

/// Python with the tools, installed once; `None` prints the reason.
fn python() -> Option<PathBuf> {
    python_with(&TOOLS)
}

fn python_with(packages: &[&str]) -> Option<PathBuf> {
    Some(installed_packages("python", packages)?.join("python"))
}

/// The library that was built with this program.
fn native_library() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let library = program.parent().unwrap().join("libspurline_python.so");
    assert!(library.is_file(), "{} was not built", library.display());
    library
}

/// A folder for PYTHONPATH with the package as an installed wheel has it.
fn assemble(world: &World, python: &Path) -> PathBuf {
    let site = world.dir("site");
    let assembled =
        finish(Command::new(python).arg(package_files().join("tests/assemble.py")).arg(native_library()).arg(&site));
    assert!(assembled.status.success(), "{assembled:?}");
    site
}

/// Runs pytest over files of the package's tests, with these environment variables.
fn run_pytest(world: &World, python: &Path, files: &[&str], variables: &[(&str, &str)]) {
    let site = assemble(world, python);
    let mut command = Command::new(python);
    command
        .args(["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--rootdir"])
        .arg(package_files().join("tests"));
    command.args(files.iter().map(|file| package_files().join("tests").join(file)));
    command.env("PYTHONPATH", site).env("PYTHONDONTWRITEBYTECODE", "1").env("TMPDIR", world.dir("tmp"));
    command.envs(variables.iter().copied());
    let out = finish(with_credentials(&mut command));
    let text = String::from_utf8_lossy(&out.stdout);
    println!("{text}");
    assert!(out.status.success(), "pytest: {}\n{text}\n{}", out.status, String::from_utf8_lossy(&out.stderr));
}

/// A node of this source and its registry.
fn start_node(world: &World, source: &Path, cache: &str) -> Node {
    let cache = world.dir(cache);
    let flags = ["--writable", "--cache-dir", cache.to_str().unwrap()];
    let source = source.to_str().unwrap();
    world.node_with(world.command(&["node", "--group-port", "0", "--source", source]).args(flags))
}

/// Runs pytest beside a node.
fn run_beside_node(python: &Path, files: &[&str]) {
    let world = World::new();
    let source = world.dir("source");
    let node = start_node(&world, &source, "cache");
    let registry = format!("static:{}", node.address);
    let variables = [("SPURLINE_TEST_SOURCE", source.to_str().unwrap()), ("SPURLINE_TEST_REGISTRY", registry.as_str())];
    run_pytest(&world, python, files, &variables);
}

#[test]
fn works_with_a_node_and_alone() {
    let Some(python) = python() else { return };
    run_beside_node(&python, &["test_reads.py", "test_readme.py", "test_writes.py"]);
}

#[test]
fn has_data_sets_and_models() {
    let Some(python) = python() else { return };
    run_beside_node(&python, &["test_data.py", "test_safetensors.py", "test_example.py"]);
}

#[test]
fn works_through_fsspec() {
    let Some(python) = python() else { return };
    run_beside_node(&python, &["test_filesystem.py"]);
}

/// fsspec's own suite, alone in a directory and with few patterns; `data_libraries` has all of it.
#[test]
fn passes_the_suite_of_fsspec() {
    let Some(python) = python() else { return };
    let world = World::new();
    let source = world.dir("source");
    run_pytest(&world, &python, &["test_fsspec_suite.py"], &[("SPURLINE_TEST_SOURCE", source.to_str().unwrap())]);
}

#[test]
fn survives_a_killed_node() {
    let Some(python) = python() else { return };
    let world = World::new();
    let source = world.dir("source");
    let nodes = ["cache-1", "cache-2"].map(|cache| start_node(&world, &source, cache));
    let registry = format!("static:{},{}", nodes[0].address, nodes[1].address);
    let pid = nodes[0].process.pid().to_string();
    let variables = [
        ("SPURLINE_TEST_SOURCE", source.to_str().unwrap()),
        ("SPURLINE_TEST_REGISTRY", registry.as_str()),
        ("SPURLINE_TEST_NODE_PID", pid.as_str()),
    ];
    run_pytest(&world, &python, &["test_outage.py"], &variables);
}

#[test]
fn reads_and_writes_a_bucket() {
    let Some(python) = python() else { return };
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("bucket");
    let big: Vec<u8> = (0..6 * MIB).map(|at| (at / MIB) as u8).collect();
    server.put("bucket", "data/big.bin", &big);
    for number in 0..20 {
        server.put("bucket", &format!("data/folder/{number}.txt"), format!("text {number}").as_bytes());
    }
    let endpoint = server.endpoint();
    let source = world.dir("source");
    let group = StagingGroup::start(&world, 2, "s3://bucket/data", &endpoint);
    let variables = [
        ("SPURLINE_TEST_SOURCE", source.to_str().unwrap()),
        ("SPURLINE_TEST_ENDPOINT", endpoint.as_str()),
        ("SPURLINE_TEST_REGISTRY", group.registry.as_str()),
    ];
    run_pytest(&world, &python, &["test_s3.py"], &variables);
}

/// Runs pytest beside a node with packages besides the tools, if `variable` is set.
fn run_with_packages(variable: &str, packages: &[&str], files: &[&str]) {
    if std::env::var_os(variable).is_none() {
        return;
    }
    let Some(python) = python_with(&[&TOOLS[..], packages].concat()) else { return };
    run_beside_node(&python, files);
}

/// pandas, Arrow, Zarr, safetensors and WebDataset, and all of fsspec's suite; `SPURLINE_TEST_DATA_LIBRARIES=1` runs the test.
#[test]
fn data_libraries() {
    run_with_packages("SPURLINE_TEST_DATA_LIBRARIES", &LIBRARIES, &["test_libraries.py", "test_example.py"]);
    run_with_packages("SPURLINE_TEST_DATA_LIBRARIES", &[], &["test_fsspec_suite.py"]);
}

/// Loaders and distributed checkpoints of torch; `SPURLINE_TEST_TORCH=1` runs the test, and `PIP_EXTRA_INDEX_URL` names torch's index.
#[test]
fn torch_reads_and_writes() {
    run_with_packages(
        "SPURLINE_TEST_TORCH",
        &TORCH_PACKAGES,
        &["test_data.py", "test_safetensors.py", "test_torch.py"],
    );
}
