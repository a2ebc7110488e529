//! `spurline k8s render`: prints the manifests of the crate `manifests`, or writes them to a directory.

use clap::{Args, ValueEnum};
use spurline_config::Fault;
use spurline_manifests::{ClusterValues, DEFAULT_VALUES, ManifestForm, RenderedFile, render};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Examples of --help.
pub const EXAMPLES: &str = "\
Examples:
  Look at what would be applied, and apply it:
    spurline k8s render --set nodes.sources='[s3://datasets]'
    spurline k8s render --values values.yaml | kubectl apply -f -
  The values with their meanings, as the start of a file:
    spurline k8s render --print-values > values.yaml
  A Kustomize base, or a Helm chart, whose defaults are these values:
    spurline k8s render --values values.yaml --form kustomize --out base
    spurline k8s render --form helm --out chart && helm install spurline ./chart -n spurline --create-namespace";

/// The forms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FormArg {
    /// One text for kubectl apply -f
    Yaml,
    /// A directory for kubectl apply -k
    Kustomize,
    /// A chart for helm install
    Helm,
}

/// The arguments of `k8s render`.
#[derive(Debug, Args)]
pub struct RenderArgs {
    /// File of values in YAML; it needs only what differs from the defaults
    #[arg(long, value_name = "FILE")]
    pub values: Option<PathBuf>,
    /// One value, over those of the file; repeat for more
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// What to make
    #[arg(long, value_name = "FORM", default_value = "yaml")]
    pub form: FormArg,
    /// Write files to this directory [default: print]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Print the default values with their meanings
    #[arg(long, conflicts_with_all = ["values", "set", "form", "out"])]
    pub print_values: bool,
}

/// Runs the command.
///
/// # Errors
/// When a value is wrong or a file can't be read or written.
pub fn run(args: RenderArgs) -> Result<ExitCode, Fault> {
    if args.print_values {
        return print(DEFAULT_VALUES);
    }
    let mut values = ClusterValues::defaults()?;
    if let Some(file) = &args.values {
        let text = std::fs::read_to_string(file).map_err(|e| {
            Fault::missing(format!("the values file {}: {e}", file.display()), "name a readable file with --values")
        })?;
        values = values.with_file(&file.display().to_string(), &text)?;
    }
    for setting in &args.set {
        values = values.with_setting(setting)?;
    }
    let form = match args.form {
        FormArg::Yaml => ManifestForm::Yaml,
        FormArg::Kustomize => ManifestForm::Kustomize,
        FormArg::Helm => ManifestForm::Helm,
    };
    let files = render(&values, form)?;
    match (args.out, form) {
        (Some(dir), _) => {
            for file in &files {
                write(&dir, file)?;
            }
            println!("{} files are in {}", files.len(), dir.display());
            Ok(ExitCode::SUCCESS)
        }
        (None, ManifestForm::Yaml) => print(&files.iter().map(|file| file.text.as_str()).collect::<String>()),
        (None, _) => Err(Fault::usage("a Kustomize base or a chart has many files", "give --out DIR")),
    }
}

fn write(dir: &Path, file: &RenderedFile) -> Result<(), Fault> {
    let path = dir.join(&file.path);
    let made = std::fs::create_dir_all(path.parent().unwrap_or(dir)).and_then(|()| std::fs::write(&path, &file.text));
    made.map_err(|e| Fault::failed(format!("{}: {e}", path.display()), "give --out a writable directory"))
}

fn print(text: &str) -> Result<ExitCode, Fault> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(Fault::failed(format!("standard output: {e}"), "")),
        _ => Ok(ExitCode::SUCCESS),
    }
}
