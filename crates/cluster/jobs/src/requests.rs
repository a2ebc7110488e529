//! Requests about jobs from other processes, and the answers. It knows no sockets.

use crate::manager::NamedJob;
use crate::{CountOptions, JobAction, JobManager, JobProgress, JobSpec};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use spurline_types::{Error, ErrorKind, Result};

/// Paths in a report: a list of files may contain millions.
const REPORT_PATHS_MAX: usize = 100;

/// A request about jobs. As JSON: `{"do": "submit", "spec": …}`, `{"do": "progress", "id": …}`, `{"do": "stop", "id": …}` or
/// `{"do": "list"}`. An id may be a subject ([`JobSpec::subject`]), which means the running job of these paths, or the latest
/// submission; a stop applies to all jobs of the paths.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "lowercase")]
pub enum JobRequest {
    /// Starts a job.
    Submit {
        /// The job.
        spec: Box<JobSpec>,
    },
    /// Queries a job.
    Progress {
        /// Name of the job, or the subject.
        id: String,
    },
    /// Stops jobs.
    Stop {
        /// Name of the job, or the subject.
        id: String,
    },
    /// Queries all jobs.
    List,
}

/// A job as shown by `--json` and the admin socket.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobReport {
    /// Name of the job.
    pub id: String,
    /// Action on the files.
    pub action: JobAction,
    /// The source's URL.
    pub source: String,
    /// The first paths.
    pub paths: Vec<String>,
    /// Number of all paths.
    pub paths_total: usize,
    /// As [`JobSpec::include`].
    pub include: Vec<String>,
    /// As [`JobSpec::exclude`].
    pub exclude: Vec<String>,
    /// As [`JobSpec::verify`].
    pub verify: bool,
    /// As [`JobSpec::metadata_only`].
    pub metadata_only: bool,
    /// As [`JobSpec::skip_if_exists`].
    pub skip_if_exists: bool,
    /// As [`JobSpec::replicas`].
    pub replicas: Option<u32>,
    /// Estimate of the time until the end.
    pub remaining_seconds: Option<f64>,
    /// The progress.
    #[serde(flatten)]
    pub progress: JobProgress,
    /// Names of the other running jobs on the same paths; not in a list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub others: Option<Vec<String>>,
    /// In the answer to a submission: whether the job was running already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub joined: Option<bool>,
}

impl JobReport {
    fn new((id, spec, progress): &NamedJob) -> JobReport {
        JobReport {
            id: id.clone(),
            action: spec.action,
            source: spec.source.clone(),
            paths: spec.paths.iter().take(REPORT_PATHS_MAX).cloned().collect(),
            paths_total: spec.paths.len(),
            include: spec.include.clone(),
            exclude: spec.exclude.clone(),
            verify: spec.verify,
            metadata_only: spec.metadata_only,
            skip_if_exists: spec.skip_if_exists,
            replicas: spec.replicas,
            remaining_seconds: progress.remaining(spec.count_options()),
            progress: progress.clone(),
            others: None,
            joined: None,
        }
    }

    /// The first of these jobs, with the names of the other running ones.
    fn of_first(named: &[NamedJob]) -> Option<JobReport> {
        let (first, others) = named.split_first()?;
        let running = others.iter().filter(|(_, _, progress)| !progress.state.is_ended());
        let others = running.map(|(id, ..)| id.clone()).collect();
        Some(JobReport { others: Some(others), ..JobReport::new(first) })
    }

    /// The counts of the job beside files.
    pub fn count_options(&self) -> CountOptions {
        CountOptions { verify: self.verify, metadata_only: self.metadata_only }
    }
}

impl JobManager {
    /// Answers a [`JobRequest`] with a [`JobReport`], or a list of reports.
    ///
    /// # Errors
    /// When the request is invalid or names no job.
    pub fn answer_request(&self, request: &Value) -> Result<Value> {
        let request = JobRequest::deserialize(request).map_err(|error| {
            Error::new(ErrorKind::Invalid, format!("this version cannot read the request about jobs: {error}"))
        })?;
        let report = match request {
            JobRequest::List => {
                let reports: Vec<JobReport> = self.list_jobs()?.iter().map(JobReport::new).collect();
                return as_value(&reports);
            }
            JobRequest::Submit { spec } => {
                let (id, joined) = self.begin_job(*spec)?;
                JobReport::of_first(&self.jobs_named(&id)?).map(|begun| JobReport { joined: Some(joined), ..begun })
            }
            JobRequest::Progress { id } => JobReport::of_first(&self.jobs_named(&id)?),
            JobRequest::Stop { id } => JobReport::of_first(&self.stop_named(&id)?),
        };
        as_value(&report)
    }

    /// Stops the jobs of a name or subject.
    fn stop_named(&self, id: &str) -> Result<Vec<NamedJob>> {
        let named = self.jobs_named(id).or_else(|error| {
            // A record of another release, which this release cannot read.
            if error.kind() == ErrorKind::NotFound || !self.stop_job(id)? {
                return Err(error);
            }
            Err(error.context(format_args!("job {id} has ended")))
        })?;
        for (id, ..) in &named {
            self.stop_job(id)?;
        }
        Ok(named)
    }
}

fn as_value(answer: &impl Serialize) -> Result<Value> {
    serde_json::to_value(answer).map_err(|error| Error::new(ErrorKind::Protocol, error.to_string()))
}
