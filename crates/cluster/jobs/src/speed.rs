//! How fast a job is: averages that forget what is seconds old.

use crate::progress::Progress;
use crate::run::{Pass, Run};
use std::time::Instant;

/// Works out how fast the job is now.
pub(crate) struct Speed {
    began: Instant,
    before: f64,
    pass: Pass,
    last: (Instant, u64, u64),
}

impl Speed {
    pub fn new(run: &Run, pass: Pass) -> Self {
        let progress = run.progress();
        let (files, bytes) = Self::counts(&progress, pass);
        Speed { began: Instant::now(), before: progress.seconds, pass, last: (Instant::now(), files, bytes) }
    }

    fn counts(progress: &Progress, pass: Pass) -> (u64, u64) {
        match pass {
            Pass::Work => (progress.files_done, progress.bytes_done),
            Pass::Verify => (progress.files_verified, progress.bytes_verified),
        }
    }

    pub fn tick(&mut self, run: &Run) {
        run.change(|progress| {
            progress.seconds = self.before + self.began.elapsed().as_secs_f64();
            let (at, files, bytes) = self.last;
            let passed = at.elapsed().as_secs_f64();
            if passed < 0.2 {
                return;
            }
            let (files_now, bytes_now) = Self::counts(progress, self.pass);
            // Half of a speed is forgotten in about two seconds.
            let keep = 0.5f64.powf(passed / 2.0);
            let mix = |old: f64, new: u64, before: u64| {
                let now = new.saturating_sub(before) as f64 / passed;
                if old == 0.0 { now } else { old * keep + now * (1.0 - keep) }
            };
            progress.files_per_second = mix(progress.files_per_second, files_now, files);
            progress.bytes_per_second = mix(progress.bytes_per_second, bytes_now, bytes);
            self.last = (Instant::now(), files_now, bytes_now);
        });
    }
}
