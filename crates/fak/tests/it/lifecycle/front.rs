//! One address before several engines: each connection goes to the engine that it points to.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use fak::runtime::{OnExit, TaskGroup};
use fak_sim::Sim;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};

/// Where connections go; a new value cuts those that are open.
struct Target {
    address: SocketAddr,
    open: TaskGroup,
}

/// The address. Dropping it closes everything.
pub(crate) struct Front {
    address: SocketAddr,
    target: Arc<Mutex<Target>>,
    _tasks: TaskGroup,
}

impl Front {
    pub(crate) async fn before(sim: &Sim) -> Self {
        Self::to(address_of(&sim.base_url())).await
    }

    pub(crate) async fn to(address: SocketAddr) -> Self {
        let target = Target { address, open: TaskGroup::new() };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let target = Arc::new(Mutex::new(target));
        let mut tasks = TaskGroup::new();
        let shared = Arc::clone(&target);
        tasks.spawn("front", OnExit::StopProcess, async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let mut target = shared.lock().unwrap();
                let address = target.address;
                target.open.spawn("connection", OnExit::Report, async move {
                    let Ok(mut engine) = TcpStream::connect(address).await else { return };
                    // Either side may leave at any time.
                    let _ = copy_bidirectional(&mut client, &mut engine).await;
                });
            }
        });
        Self { address, target, _tasks: tasks }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn port(&self) -> u16 {
        self.address.port()
    }

    /// From here on the engine behind the address is this one.
    pub(crate) fn point_to(&self, sim: &Sim) {
        self.cut(|_| address_of(&sim.base_url()));
    }

    /// Cuts what is open, and connects again to where `moved` says.
    pub(crate) fn cut(&self, moved: impl FnOnce(SocketAddr) -> SocketAddr) {
        let mut target = self.target.lock().unwrap();
        let address = moved(target.address);
        *target = Target { address, open: TaskGroup::new() };
    }
}

/// Of a URL without a path.
pub(crate) fn address_of(url: &str) -> SocketAddr {
    url.split_once("://").unwrap().1.parse().unwrap()
}
