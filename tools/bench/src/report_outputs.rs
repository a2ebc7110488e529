//! The forms of a report that a user requests, and the writing of them. It knows no figures.

use crate::error::Result;
use crate::plot::BenchChart;
use crate::suite;
use serde_json::Value;
use std::path::PathBuf;

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
