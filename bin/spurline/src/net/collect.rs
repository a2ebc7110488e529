//! `spurline net collect`: packs the files that `net list` and `net doctor` read from this host.

use super::facts::FromArgs;
use clap::Args;
use spurline_config::Fault;
use spurline_fabric::{DoctorOptions, HostTree, TreeEntry, archive, collect_facts, examine};
use spurline_types::units::human_bytes;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Where the collected files name the node of a cluster.
pub const NODE_NAME_FILE: &str = "spurline/node-name";

/// The arguments of `net collect`.
#[derive(Debug, Args)]
pub struct CollectArgs {
    /// File to write; - is standard output
    #[arg(short, long, value_name = "FILE.tar.zst")]
    pub output: PathBuf,
    #[command(flatten)]
    pub from: FromArgs,
}

/// Runs the command.
///
/// # Errors
/// When the file can't be written.
pub fn run(args: CollectArgs) -> Result<ExitCode, Fault> {
    let tree = args.from.tree()?.with_recording();
    let (packed, files) = pack_facts(&tree).map_err(|e| output_error(&args.output, &e))?;
    if args.output.as_os_str() == "-" {
        std::io::stdout().write_all(&packed).map_err(|e| output_error(&args.output, &e))?;
        return Ok(ExitCode::SUCCESS);
    }
    std::fs::write(&args.output, &packed).map_err(|e| output_error(&args.output, &e))?;
    let left_out = tree.left_out();
    anstream::eprintln!(
        "{}: {} files, {}; addresses and names of interfaces are in it, keys and passwords are not",
        args.output.display(),
        files,
        human_bytes(packed.len() as u64)
    );
    if !left_out.is_empty() {
        anstream::eprintln!(
            "{} files could not be read (the first: {}: {})",
            left_out.len(),
            left_out[0].path,
            left_out[0].why
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// The archive, and the number of files inside.
///
/// # Errors
/// When the facts can't be packed.
pub(super) fn pack_facts(tree: &HostTree) -> std::io::Result<(Vec<u8>, usize)> {
    let mut entries = collect_facts(tree, |tree| {
        drop(examine(tree, &DoctorOptions::default()));
        // `k8s` reads device nodes as well.
        drop(spurline_kube_devices::NodeHcas::read_from(tree));
    });
    // In a pod no file names the node.
    if let Ok(name) = std::env::var("NODE_NAME") {
        entries.insert(NODE_NAME_FILE.to_owned(), TreeEntry::File(name.into_bytes()));
    }
    let mut packed = Vec::new();
    archive::write_archive(&entries, &mut packed)?;
    Ok((packed, entries.len()))
}

fn output_error(output: &std::path::Path, error: &std::io::Error) -> Fault {
    Fault::failed(format!("{}: {error}", output.display()), "name a file in a directory that is writable")
}
