# One image, its commands: `api` (the default), `worker`, `migrate`, and `executor`, which Spark asks for on Kubernetes.
# The root file system may be read-only: everything writes below /scratch and /tmp, and `serve` with no settings keeps
# its data in /data.

# Bookworm is named because Spark's JRE 17 is in it; the release after it has 21 only.
FROM python:3.11-slim-bookworm AS build

# PyICU, a dependency of followthemoney, comes as source.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        g++=4:12.* \
        libicu-dev=72.* \
        pkg-config=1.8.* \
    && rm -rf /var/lib/apt/lists/*

RUN python -m venv /opt/tarn
ENV PATH=/opt/tarn/bin:$PATH
WORKDIR /src

# Dependencies first, on a package that is still empty, so that a change of code does not fetch them again.
COPY LICENSE README.md constraints.txt pyproject.toml ./
COPY app/tarn/__init__.py ./app/tarn/
RUN pip install --no-cache-dir --constraint constraints.txt '.[otel]'

COPY app ./app
COPY migrations ./migrations
RUN pip install --no-cache-dir --no-deps --force-reinstall .


FROM python:3.11-slim-bookworm

RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        libicu72=72.* \
        openjdk-17-jre-headless=17.* \
    && rm -rf /var/lib/apt/lists/*

# The number is fixed so that volumes keep their owner and Kubernetes can see that it is not root.
# Spark asks for the user's name, so it needs a line in /etc/passwd.
RUN groupadd --gid 10001 tarn \
    && useradd --no-log-init --uid 10001 --gid tarn --home-dir /scratch --no-create-home --shell /usr/sbin/nologin tarn \
    && install --directory --owner tarn --group tarn /data /scratch

COPY --from=build /opt/tarn /opt/tarn

ENV PATH=/opt/tarn/bin:$PATH \
    HOME=/scratch \
    TMPDIR=/scratch \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    PYSPARK_PYTHON=/opt/tarn/bin/python \
    PYSPARK_DRIVER_PYTHON=/opt/tarn/bin/python \
    SPARK_LOCAL_DIRS=/scratch \
    TARN_HOST=0.0.0.0 \
    TARN_LAKE_URI=/data/lake \
    TARN_DATABASE_URL=sqlite:////data/tarn.db \
    TARN_ADMIN_KEY_FILE=/data/admin.key

# DuckDB and Spark spill into TMPDIR and SPARK_LOCAL_DIRS, or into the working directory where nobody tells them otherwise.
WORKDIR /scratch
USER 10001:10001
VOLUME ["/scratch", "/tmp"]
EXPOSE 8000

# For the API. A container that runs `worker` or `migrate` listens on no port: switch it off there.
# The empty proxy handler keeps a proxy of the environment out of a call to ourselves.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.build_opener(u.ProxyHandler({})).open('http://127.0.0.1:' + os.environ.get('TARN_PORT', '8000') + '/healthz', timeout=4)"]

ENTRYPOINT ["tarn"]
CMD ["api"]
