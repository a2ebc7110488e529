//! The forms of a report that a user requests, and the writing of them. It knows no figures.

use crate::error::{BenchError, Result};
use crate::plot::BenchChart;
use crate::suite;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Forms of a report beside its table.
#[derive(Debug, clap::Args)]
pub struct ReportOutputs {
    /// Write all figures as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write a page with plots, which needs no network
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Plot on the terminal
    #[arg(long)]
    pub plot: bool,
}

impl ReportOutputs {
    /// Checks that the requested files have a folder, before anything is measured.
    ///
    /// # Errors
    /// `Missing` for a file without one.
    pub fn check_places(&self) -> Result<()> {
        check_report_place("--json", self.json.as_deref())?;
        check_report_place("--html", self.html.as_deref())
    }

    /// Plots on the terminal, where that was requested.
    pub fn plot_charts(&self, charts: &[BenchChart]) {
        if self.plot {
            charts.iter().for_each(|chart| anstream::print!("{}", chart.to_text(100)));
        }
    }

    /// Writes the requested files, and prints their names.
    ///
    /// # Errors
    /// When one can't be written.
    pub fn write_reports(&self, result: &Value, page: impl FnOnce() -> String) -> Result<()> {
        suite::write_report(self.json.as_deref(), || format!("{result:#}\n"))?;
        suite::write_report(self.html.as_deref(), page)?;
        for path in [&self.json, &self.html].into_iter().flatten() {
            anstream::println!("written: {}", path.display());
        }
        Ok(())
    }
}

/// Checks that the file of a flag has a folder, where the flag is given.
///
/// # Errors
/// `Missing` without the folder.
pub fn check_report_place(flag: &str, path: Option<&Path>) -> Result<()> {
    let Some(path) = path else { return Ok(()) };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if folder.is_dir() && !path.is_dir() {
        return Ok(());
    }
    Err(BenchError::Missing(if path.is_dir() {
        format!("{flag} {}: this is a folder; name a file", path.display())
    } else {
        format!("{flag} {}: there is no folder {}; make it, or name another file", path.display(), folder.display())
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_needs_a_folder() {
        let dir = tempfile::tempdir().unwrap();
        let said = |path: &Path| check_report_place("--json", Some(path)).map_err(|error| error.to_string());
        assert_eq!(said(&dir.path().join("r.json")), Ok(()));
        assert_eq!(said(Path::new("r.json")), Ok(()));
        assert!(check_report_place("--json", None).is_ok());
        assert!(said(&dir.path().join("no/r.json")).unwrap_err().contains("there is no folder"));
        assert!(said(dir.path()).unwrap_err().contains("name a file"));
        assert!(!dir.path().join("no").exists());
    }
}
