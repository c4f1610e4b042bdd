# The serving image: NVIDIA's Triton with Forgeline and the models of model_repository/.
#
#   builder deploy ENGINE --repository model_repository --name ensemble --copy
#   docker build -t forgeline .
#   docker run --rm -p 8000:8000 -p 8001:8001 -p 8002:8002 --shm-size=256m forgeline
#
# Models from outside the image:  docker run … -v "$PWD/model_repository:/models:ro" forgeline
# The Python backend of the base image must be of a Python version that pyproject.toml allows (24.04 and later: 3.10 or 3.12).
ARG TRITON_TAG=25.06-py3
FROM nvcr.io/nvidia/tritonserver:${TRITON_TAG}

ENV PIP_NO_CACHE_DIR=1 PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY builder builder
COPY runtime runtime
COPY plugins plugins
RUN python3 -m pip install . && cd / && rm -rf /src && python3 -c "import runtime.engine"
WORKDIR /
COPY model_repository /models

EXPOSE 8000 8001 8002
HEALTHCHECK --start-period=60s CMD curl --fail --silent http://127.0.0.1:8000/v2/health/ready
ENTRYPOINT ["runtime", "serve", "--repository", "/models", "--host", "0.0.0.0"]
